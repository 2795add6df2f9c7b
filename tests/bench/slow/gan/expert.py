"""A DCGAN on drawn shapes, with the statistics kept on the device and the input pipeline tuned by hand."""
import argparse
import os
import random
import time

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """Ellipses drawn large, rotated by a random angle and scaled down."""

    def __init__(self, count, size):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draw_from = random.Random(index)
        image = Image.new("L", (192, 192), 20)
        draw = ImageDraw.Draw(image)
        for _ in range(4):
            x, y, r = draw_from.randint(20, 170), draw_from.randint(20, 170), draw_from.randint(8, 50)
            draw.ellipse((x - r, y - r // 2, x + r, y + r // 2), fill=draw_from.randint(60, 255))
        image = image.rotate(float(torch.rand(())) * 360, Image.BICUBIC).resize((self.size, self.size), Image.LANCZOS)
        return torch.from_numpy(np.asarray(image, dtype=np.float32) / 127.5 - 1).unsqueeze(0)


def generator(noise, width, size):
    layers = [nn.ConvTranspose2d(noise, width * 4, 4), nn.BatchNorm2d(width * 4), nn.ReLU(True)]
    side, channels = 4, width * 4
    while side < size // 2:
        layers += [nn.ConvTranspose2d(channels, channels // 2, 4, 2, 1), nn.BatchNorm2d(channels // 2), nn.ReLU(True)]
        side, channels = side * 2, channels // 2
    return nn.Sequential(*layers, nn.ConvTranspose2d(channels, 1, 4, 2, 1), nn.Tanh())


def discriminator(width, size):
    layers, side, channels = [nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2, True)], size // 2, width
    while side > 4:
        layers += [nn.Conv2d(channels, channels * 2, 4, 2, 1), nn.BatchNorm2d(channels * 2), nn.LeakyReLU(0.2, True)]
        side, channels = side // 2, channels * 2
    return nn.Sequential(*layers, nn.Conv2d(channels, 1, 4))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--width", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Shapes(args.batch_size * 25, args.size)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True,
                        num_workers=max(1, min(14, os.cpu_count() - 1)), pin_memory=device.type == "cuda",
                        persistent_workers=True, prefetch_factor=4)
    net_g = generator(64, args.width, args.size).to(device)
    net_d = discriminator(args.width, args.size).to(device)
    opt_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()

    step, g_losses, d_losses = 0, [], []
    start = time.time()
    while step < args.steps:
        for real in loader:
            real = real.to(device, non_blocking=True)
            count = real.size(0)

            net_d.zero_grad()
            label = torch.full((count,), 1.0, device=device)
            output = net_d(real).view(-1)
            err_real = criterion(output, label)
            err_real.backward()
            d_x = torch.sigmoid(output.detach()).mean()
            noise = torch.randn(count, 64, 1, 1, device=device)
            fake = net_g(noise)
            label.fill_(0.0)
            output = net_d(fake.detach()).view(-1)
            err_fake = criterion(output, label)
            err_fake.backward()
            d_g_z1 = torch.sigmoid(output.detach()).mean()
            err_d = err_real + err_fake
            opt_d.step()

            net_g.zero_grad()
            label.fill_(1.0)
            output = net_d(fake).view(-1)
            err_g = criterion(output, label)
            err_g.backward()
            d_g_z2 = torch.sigmoid(output.detach()).mean()
            opt_g.step()

            g_losses.append(err_g.detach())
            d_losses.append(err_d.detach())
            step += 1
            if step % 20 == 0:
                print(f"step {step} loss D {err_d.item():.4f} loss G {err_g.item():.4f} D(x) {d_x:.4f} D(G(z)) {d_g_z1:.4f} / {d_g_z2:.4f}")
            if step == args.steps:
                break
    print(f"mean loss D {sum(d_losses) / step:.4f} loss G {sum(g_losses) / step:.4f}")
    print(f"done: {args.steps / (time.time() - start):.2f} steps/s")


if __name__ == "__main__":
    main()
