"""Small trainings with a planted bug, and correct ones that look wrong to a simple check: the proof of ``diagnosis``.

Each function of ``planted`` and ``correct`` makes a LightningModule and its loaders (train, val). All data are small,
and made or installed here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Program:
    """A training.

    Args:
        name: Of the function that makes it.
        make: Returns the module and its loaders.
        expect: Checks that name the bug for the right reason; empty for a correct program.
        trainer: Arguments of the trainer.
        callbacks: Makes further callbacks.
        resume: Whether it is trained for an epoch, and then resumed.
    """

    name: str
    make: Callable[[], tuple[L.LightningModule, Any, Any]]
    expect: tuple[str, ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    resume: bool = False


BUGS: dict[str, Program] = {}
CORRECT: dict[str, Program] = {}


def bug(*expect: str, callbacks: Callable[[], list[Any]] = list, resume: bool = False, **trainer: Any) -> Any:
    """A program with a bug, and the names of the checks that find it."""

    def add(make: Any) -> Any:
        assert make.__name__ not in BUGS
        BUGS[make.__name__] = Program(make.__name__, make, expect, trainer, callbacks, resume)
        return make

    return add


def no_bug(*, callbacks: Callable[[], list[Any]] = list, **trainer: Any) -> Any:
    """A program without a bug."""

    def add(make: Any) -> Any:
        assert make.__name__ not in CORRECT
        CORRECT[make.__name__] = Program(make.__name__, make, (), trainer, callbacks)
        return make

    return add


class Base(L.LightningModule):
    """A correct classifier of 8 x 8 digits, parts of which the programs replace."""

    lr = 1e-2
    num_classes = 10

    def __init__(self) -> None:
        super().__init__()
        self.net = self.network()

    def network(self) -> nn.Module:
        return mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(*batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        out = self(x)
        self.log("val/loss", F.cross_entropy(out, y))
        self.log("val/acc", (out.argmax(1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class LossOnly(Base):
    """Validates the loss alone."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(*batch) if isinstance(batch, list | tuple) else self.loss(batch))


class Manual(Base):
    """Manual optimization, without validation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class Table(LossOnly):
    """Predicts one value of a table."""

    def network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x)[:, 0], y)


class Causal(LossOnly):
    """A causal language model of a Markov chain, whose embedding is its last layer if ``tied``."""

    causal, tied, dropout = True, False, 0.0

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places, self.net = nn.Embedding(12, 32), nn.Embedding(16, 32), nn.Linear(32, 12, bias=False)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=self.dropout, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1)
        if self.tied:
            self.net.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) + self.places(torch.arange(x.shape[1], device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        return self.net(self.body(hidden, mask=mask, is_causal=self.causal))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())


class Convnet(nn.Sequential):
    """Two convolutions, BatchNorm and dropout."""

    def __init__(self, outputs: int = 10, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        first = nn.Conv2d(1, 8, 3, padding=1), norm(8), nn.ReLU(), nn.MaxPool2d(2)
        second = nn.Conv2d(8, 16, 3, padding=1), norm(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        super().__init__(*first, *second, nn.Dropout(0.2), nn.Linear(16, outputs))


def mlp(inputs: int = 64, hidden: int = 64, outputs: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def loaders(train: Any, val: Any, batch: int = 32, **options: Any) -> tuple[DataLoader, DataLoader]:
    return DataLoader(train, batch, shuffle=True, **options), DataLoader(val, batch)


def halves(*tensors: Tensor, split: int = 480, batch: int = 32) -> tuple[DataLoader, DataLoader]:
    """Loaders of the first samples, and of the others."""
    if len(tensors) == 1:
        return loaders(tensors[0][:split], tensors[0][split:], batch)
    parts = [TensorDataset(*(t[rows] for t in tensors)) for rows in (slice(split), slice(split, None))]
    return loaders(*parts, batch=batch)


@cache
def _digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return torch.tensor(x, dtype=torch.float32)[order].reshape(-1, 1, 8, 8) / 16, torch.tensor(y)[order]


def digits(count: int = 640, val: int = 320, *, loaded: bool = True, batch: int = 32) -> Any:
    x, y = (t.clone() for t in _digits())
    parts = TensorDataset(x[:count], y[:count]), TensorDataset(x[count : count + val], y[count : count + val])
    return loaders(*parts, batch=batch) if loaded else parts


def diabetes(*, loaded: bool = True, scale: bool = True) -> Any:
    x, y = load_diabetes(return_X_y=True)
    x, y = torch.tensor(x * 20, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    if scale:
        y = (y - y.mean()) / y.std()
    parts = TensorDataset(x[:320], y[:320]), TensorDataset(x[320:], y[320:])
    return loaders(*parts) if loaded else parts


@cache
def _tokens(length: int, count: int, vocab: int) -> Tensor:
    rng = np.random.default_rng(0)
    table = rng.dirichlet(np.full(vocab, 0.3), vocab).cumsum(1)
    rows = np.zeros((count, length), np.int64)
    rows[:, 0] = rng.integers(vocab, size=count)
    for t in range(1, length):
        rows[:, t] = (rng.random(count)[:, None] > table[rows[:, t - 1]]).sum(1).clip(max=vocab - 1)
    return torch.tensor(rows)


def tokens(length: int = 16, count: int = 640, vocab: int = 12) -> Tensor:
    """Sequences of a Markov chain, shape (count, length)."""
    return _tokens(length, count, vocab).clone()


def sequences(count: int = 640, length: int = 12, features: int = 5) -> tuple[Tensor, Tensor]:
    """Series and a class that depends on their order, shapes (N, T, F) and (N,)."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (count,), generator=g)
    t = torch.arange(length, dtype=torch.float32)
    x = torch.randn(count, length, features, generator=g) * 0.5
    x[:, :, 0] += torch.sin(t[None] * (y[:, None] + 1) * 0.5)
    return x, y


def segments(count: int = 320, size: int = 8) -> tuple[Tensor, Tensor]:
    """Pictures and a class of each pixel, shapes (N, 1, S, S) and (N, S, S)."""
    g = torch.Generator().manual_seed(0)
    y = torch.zeros(count, size, size, dtype=torch.long)
    for n in range(count):
        a, b = torch.randint(0, size - 3, (2,), generator=g)
        y[n, a : a + 3, b : b + 4] = 1 + n % 2
    x = y.float() / 2 + torch.randn(count, size, size, generator=g) * 0.2
    return x[:, None], y


def load_programs() -> None:
    """Register all programs."""
    for kind in ("planted", "correct"):
        for file in sorted(Path(__file__).with_name(kind).glob("[a-z]*.py")):
            import_module(f"programs.{kind}.{file.stem}")
