"""A small BERT, trained to find masked words.

Source: Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding, 2018.
"""

import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForMaskedLM

from boltcutter import DataModule, Splits, split_indices

LIBRARIES = ["numpy", "scipy", "sklearn", "torch"]
PAD, UNKNOWN, MASK, FIRST = range(4)  # tokens that are no words


class Docstrings(DataModule):
    """The first 32 words of docstrings of four libraries, whose names are left out."""

    def __init__(self, vocab_size: int = 3000, **options: Any) -> None:
        super().__init__(**options)
        self.vocab_size, self.classes = vocab_size, LIBRARIES

    def load(self) -> Splits:
        texts = [(words, label) for label, name in enumerate(LIBRARIES) for words in read_docstrings(name)[:1500]]
        labels = torch.tensor([label for _, label in texts])
        parts = split_indices(len(texts), (0.7, 0.15, 0.15), self.seed, labels.numpy())
        counted = Counter(word for index in parts[0] for word in texts[index][0])
        known = {word: number for number, (word, _) in enumerate(counted.most_common(self.vocab_size - 4), 4)}
        rows = [[FIRST, *(known.get(word, UNKNOWN) for word in words)] for words, _ in texts]
        tokens = torch.tensor([row + [PAD] * (33 - len(row)) for row in rows])
        return Splits(*(TensorDataset(tokens[part], labels[part]) for part in parts))


def read_docstrings(library: str) -> list[list[str]]:
    files = [file for file in sorted(Path(find_spec(library).origin).parent.rglob("*.py")) if "test" not in str(file)]
    found = [text for file in files[:400] for text in re.findall(r'"""(.{80,}?)"""', file.read_text(), re.S)]
    return [[word for word in re.findall("[a-z]+", text.lower()) if word not in LIBRARIES][:32] for text in found]


class Pretraining(L.LightningModule):
    """A small BERT that finds the masked words of a text; its weights are written to ``folder``."""

    def __init__(self, vocab_size: int, folder: str, lr: float = 1e-3) -> None:
        super().__init__()
        self.folder, self.lr = folder, lr
        sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
        self.bert = BertForMaskedLM(BertConfig(vocab_size=vocab_size, max_position_embeddings=33, **sizes))

    def training_step(self, batch: tuple[Tensor, Tensor], stage: str = "train") -> Tensor:
        tokens, _ = batch
        masked = (torch.rand(tokens.shape, device=self.device) < 0.15) & (tokens > FIRST)
        truth = tokens.masked_fill(~masked, -100)  # -100: not in the loss
        loss = self.bert(tokens.masked_fill(masked, MASK), attention_mask=tokens.ne(PAD), labels=truth).loss
        self.log(f"{stage}/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.training_step(batch, "val")

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            self.bert.save_pretrained(self.folder)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr)
