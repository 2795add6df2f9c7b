import torch


def epoch(model, loader, optimizer, device):
    total = 0
    weighted, hits, seen = 0.0, 0, 0
    for step, (x, y) in enumerate(loader):
        x, y = x.cuda(), y.to(device=device)
        out = model(x.to(torch.float32))
        loss = out.pow(2).mean()
        total = total + float(loss)
        weighted += loss.cpu().item() * x.size(0)
        hits += out.eq(y).sum().item()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seen += len(y); torch.cuda.empty_cache()
        if step % 10 == 9:
            torch.cuda.empty_cache()
        if step % 10 == 9:
            print(f"{step} {total / (step + 1):.4f} {100. * hits / seen:.2f}%")
        else:
            torch.cuda.empty_cache()
    else:
        seen = seen
    return total / len(loader), weighted, hits
