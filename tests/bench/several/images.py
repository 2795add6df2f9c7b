"""slow_scripts/images with one rank a GPU: the same data, transforms and model under DistributedDataParallel, as people
write it at first. `--prepare` makes the images and ends; `--model small` needs no torchvision (for CPUs)."""
import argparse, os, time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def make_image(path):
    number = int(os.path.basename(path).partition(".")[0])
    coarse = np.random.default_rng(number).integers(0, 255, (12, 16, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((500, 375), Image.BICUBIC).save(path + ".part", "JPEG", quality=90)
    os.replace(path + ".part", path)


def make_images(folder, count):
    os.makedirs(folder, exist_ok=True)
    paths = [os.path.join(folder, f"{number:05d}.jpg") for number in range(count)]
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        with ProcessPoolExecutor() as pool:
            list(pool.map(make_image, missing, chunksize=16))


class ImageFolder(Dataset):
    def __init__(self, folder, count, size):
        self.paths = sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".jpg"))[:count]
        self.size = size
        self.mean = np.array((0.485, 0.456, 0.406), dtype=np.float32)
        self.std = np.array((0.229, 0.224, 0.225), dtype=np.float32)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        image = Image.open(self.paths[i]).convert("RGB")
        image = self.random_crop(image).resize((self.size, self.size), Image.BILINEAR)
        if torch.rand(()) < 0.5:
            image = image.transpose(Image.FLIP_LEFT_RIGHT)
        pixels = (np.asarray(image, dtype=np.float32) / 255 - self.mean) / self.std
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), i % 10

    def random_crop(self, image):
        width, height = image.size
        share = float(torch.empty(()).uniform_(0.08, 1.0)) ** 0.5
        w, h = max(1, int(width * share)), max(1, int(height * share))
        left = int(torch.randint(0, width - w + 1, ()))
        top = int(torch.randint(0, height - h + 1, ()))
        return image.crop((left, top, left + w, top + h))


def make_model(kind):
    if kind == "resnet50":
        from torchvision import models
        return models.resnet50(num_classes=10)
    return nn.Sequential(nn.Conv2d(3, 16, 7, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="/tmp/several_images")
    parser.add_argument("--count", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--prepare", action="store_true")
    args = parser.parse_args()
    if args.prepare:
        make_images(args.data, args.count)
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(rank)
    if rank == 0:
        make_images(args.data, args.count)
    dist.barrier()
    data = ImageFolder(args.data, args.count, args.size)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(make_model(args.model).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    step, epoch, running_loss, correct, seen = 0, 0, 0.0, 0, 0
    start = time.time()
    while step < args.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for images, labels in loader:
            images = images.to(device)
            labels = labels.to(device)
            optimizer.zero_grad()
            outputs = model(images)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            correct += (outputs.argmax(1) == labels).sum().item()
            seen += labels.size(0)
            step += 1
            if rank == 0:
                print(f"step {step} loss {running_loss / step:.4f} acc {correct / seen:.3f}")
            if step == args.steps:
                break
    if rank == 0:
        print(f"done: {args.steps / (time.time() - start):.2f} steps/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
