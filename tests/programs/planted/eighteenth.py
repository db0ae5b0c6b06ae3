"""Bugs of a list that a reviewer wrote, of kinds that the checks saw in one form only."""

import torch
from programs import Base, Table, bug, diabetes, digits, loaders
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def with_gaps(*tables):
    """Two targets for each sample, of which 30% are missing."""
    found = []
    for seed, (x, y) in enumerate(table.tensors for table in tables):
        t, g = torch.stack([y, -y], 1), torch.Generator().manual_seed(seed)
        found.append(TensorDataset(x, t.masked_fill(torch.rand(t.shape, generator=g) < 0.3, float("nan"))))
    return found


class Rows(torch.utils.data.Dataset):
    """Samples of a list."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Two(Table):
    """Predicts two values of a table."""

    def network(self):
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))


@bug("bn-momentum")
def momentum_is_the_second_argument():
    class Net(Base):
        def network(self):
            norm = nn.BatchNorm1d(64, 0.8)
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), norm, nn.ReLU(), nn.Linear(64, 10))

    return Net(), *digits()


@bug("missing-targets")
def missing_values_are_minus_one():
    class Net(Two):
        def loss(self, x, y):
            return F.mse_loss(self(x), torch.nan_to_num(y, nan=-1.0))

    return Net(), *loaders(*with_gaps(*diabetes(loaded=False)))


@bug("missing-targets")
def missing_values_are_in_a_difference():
    class Net(Two):
        def loss(self, x, y):
            y = torch.where(y.isnan(), torch.full_like(y, -9.0), y)
            return (self(x) - y).abs().mean()

    return Net(), *loaders(*with_gaps(*diabetes(loaded=False)))


@bug("unread-samples")
def length_is_that_of_the_first_sample():
    class Lines(Rows):
        def __len__(self):
            return len(self.rows[0]) * 16

    return Base(), *loaders(*(Lines([*part]) for part in digits(loaded=False)))


@bug("unread-samples")
def length_is_that_of_the_first_path():
    class Files(Rows):
        def __len__(self):
            return len(self.rows[0])

        def __getitem__(self, i):
            return store[self.rows[i]]

    parts = zip(("train", "validation"), digits(loaded=False), strict=True)
    store = {f"/data/pictures/{name}/{i:028d}": part[i] for name, part in parts for i in range(len(part))}
    return Base(), *loaders(*(Files([k for k in store if f"/{name}/" in k]) for name in ("train", "validation")))
