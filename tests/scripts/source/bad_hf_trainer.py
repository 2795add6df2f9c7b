import torch
from transformers import Trainer


class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels)
        self.log({"raw": loss.item()})  # SYN001
        weights = torch.tensor([0.2, 0.8], device=outputs.logits.device)  # CPY006
        loss = loss * weights.sum()
        return (loss, outputs) if return_outputs else loss
