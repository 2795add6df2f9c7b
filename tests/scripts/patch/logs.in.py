"""A classifier that shows its running figures at each step, and keeps its losses in lists."""
import torch
from torch import nn


def batches(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.rand(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)


def main(count=47):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    losses, history = [], {"norm": [], "hits": []}
    for epoch in range(2):
        running_loss, correct, seen = 0.0, 0, 0
        for x, y in batches(count):
            outputs = model(x)
            loss = criterion(outputs, y)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert not torch.isnan(norm)
            if torch.isnan(loss):
                raise RuntimeError("loss is nan")
            optimizer.step()
            losses.append(loss.item())
            history["norm"].append(float(norm))
            history["hits"].append((outputs.argmax(1) == y).sum().item())
            running_loss += loss.item()
            correct += (outputs.argmax(1) == y).sum().item()
            seen += y.size(0)
            mean = running_loss / seen
            print(
                f"epoch {epoch} loss {mean:.4f}",
                f"acc {correct / seen:.3f}",
            )
            print("norm", norm.item())
        print("epoch", epoch, running_loss, correct, len(losses))
    print(losses, history)
    return model


if __name__ == "__main__":
    main()
