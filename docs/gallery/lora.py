"""Low-rank adaptation of a BERT: which library is a docstring from?

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
"""

import lightning as L
import torch
from bert import LIBRARIES, PAD
from torch import Tensor, nn
from transformers import BertForSequenceClassification


class Adapted(nn.Module):
    """A linear layer that is frozen, and a trained product of two small matrices beside it."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer, self.down = layer, nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class LoRA(L.LightningModule):
    """A pretrained BERT as a classifier; trained are its last layer, and adapters of its queries and values.

    Args:
        pretrained: Folder of the weights, or a name on the Hugging Face Hub.
        rank: Of the adapters.
        lr: Learning rate of AdamW.
    """

    def __init__(self, pretrained: str, rank: int = 8, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.bert = BertForSequenceClassification.from_pretrained(pretrained, num_labels=len(LIBRARIES))
        self.bert.train()  # from_pretrained returns it in evaluation mode, in which Lightning leaves it
        self.bert.bert.requires_grad_(False)
        for block in self.bert.bert.encoder.layer:
            attention = block.attention.self
            attention.query, attention.value = Adapted(attention.query, rank), Adapted(attention.value, rank)

    def step(self, batch: tuple[Tensor, Tensor], stage: str) -> dict[str, Tensor]:
        tokens, labels = batch
        found = self.bert(tokens, attention_mask=tokens.ne(PAD), labels=labels)
        accuracy = (found.logits.argmax(1) == labels).float().mean()
        self.log_dict({f"{stage}/loss": found.loss, f"{stage}/accuracy": accuracy})
        return {"loss": found.loss, "predictions": found.logits.detach().softmax(1), "targets": labels}

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.step(batch, "train")["loss"]

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.step(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return self.step(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], self.hparams.lr)
