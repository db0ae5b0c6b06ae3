"""A graph network: few nodes are labeled, and the edges tell about the others.

Source: Kipf and Welling, Semi-Supervised Classification with Graph Convolutional Networks, 2017; several hops at once:
Wu et al., Simplifying Graph Convolutional Networks, 2019.
"""

from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from boltcutter import DataModule, Splits, split_indices


class Neighbors(DataModule):
    """Handwritten digits, each joined with those that look most like it.

    The samples are numbers of nodes and their labels; each batch has the whole graph.

    Args:
        num_labeled: Number of nodes in the train split.
        num_neighbors: Number of edges of each node.
        options: Arguments of ``DataModule``.
    """

    def __init__(self, num_labeled: int = 50, num_neighbors: int = 8, **options: Any) -> None:
        super().__init__(**options)
        digits = load_digits()
        self.num_labeled, self.targets = num_labeled, torch.tensor(digits.target)
        self.pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
        edges = torch.tensor(kneighbors_graph(digits.data, num_neighbors).toarray(), dtype=torch.float32)
        edges = ((edges + edges.T) > 0).float() + torch.eye(len(edges))
        degree = edges.sum(1).rsqrt()
        self.edges = (degree[:, None] * edges * degree).to_sparse()  # normalized, with loops

    def load(self) -> Splits:
        count = len(self.targets)
        fractions = (self.num_labeled / count, 0.1, 0.9 - self.num_labeled / count)
        parts = split_indices(count, fractions, self.seed, self.targets.numpy())
        return Splits(*(TensorDataset(torch.as_tensor(part), self.targets[part]) for part in parts))


class GraphNetwork(L.LightningModule):
    """Averages the pixels over the neighborhood of each node, then classifies it."""

    def __init__(self, num_hops: int = 4, hidden_size: int = 64, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(nn.Linear(64, hidden_size), nn.ReLU(), nn.Dropout(0.3), nn.Linear(hidden_size, 10))

    def step(self, batch: tuple[Tensor, Tensor], stage: str) -> dict[str, Tensor]:
        nodes, targets = batch
        graph = self.trainer.datamodule
        hidden = graph.pixels
        for _ in range(self.hparams.num_hops):
            hidden = graph.edges @ hidden
        logits = self.network(hidden[nodes])
        loss, accuracy = cross_entropy(logits, targets), (logits.argmax(1) == targets).float().mean()
        self.log_dict({f"{stage}/loss": loss, f"{stage}/accuracy": accuracy})
        return {"loss": loss, "predictions": logits.detach().softmax(1), "targets": targets}

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.step(batch, "train")["loss"]

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.step(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return self.step(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.hparams.lr)
