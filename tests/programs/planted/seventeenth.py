"""Bugs of a half set whose writer had seen neither checks nor programs."""

import torch
from programs import Base, Table, bug, diabetes, digits, halves
from torch import nn
from torch.nn import functional as F


@bug("one-batch", limit_train_batches=1)
def one_batch_of_each_epoch():
    class Net(Base):
        pass

    return Net(), *digits()


@bug("quantile-sign")
def quantile_of_a_layer_has_the_wrong_sign():
    class Pinball(nn.Module):
        def __init__(self, level):
            super().__init__()
            self.level = level

        def forward(self, prediction, target):
            error = prediction - target
            return torch.max(self.level * error, (self.level - 1) * error).mean()

    class Net(Table):
        def __init__(self):
            super().__init__()
            self.pinball = Pinball(0.9)

        def loss(self, x, y):
            return self.pinball(self(x)[:, 0], y)

    return Net(), *diabetes()


@bug("mixed-labels")
def labels_are_mixed_with_other_samples():
    class Net(Base):
        def training_step(self, batch, batch_idx):
            x, y = batch
            lam, order = 0.7, torch.randperm(len(x))
            out = self(lam * x + (1 - lam) * x[order])
            order = torch.randperm(len(x))
            return lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[order])

    return Net(), *digits()


def rewards_to_go(rewards, gamma=0.9):
    out, total = [], 0.0
    for r in reversed(rewards):
        total = r + gamma * total
        out.append(total)
    return out


@bug("returns-of-past")
def returns_are_in_reverse_order():
    class Net(Table):
        def network(self):
            return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))

    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 10, 4, generator=g)
    y = torch.stack([torch.tensor(rewards_to_go(r.tolist())) for r in x[..., 0]])
    return Net(), *halves(x.flatten(0, 1), y.flatten())
