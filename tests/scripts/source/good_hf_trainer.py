import torch
from transformers import Trainer, TrainerCallback


class Weighted(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weights = torch.tensor([0.2, 0.8], device=self.args.device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=self.weights)
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        print(metrics["eval_loss"])
        return metrics


class Report(TrainerCallback):
    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        print(next(model.parameters()).mean().item())
