"""The programs of ``planted/twentysixth.py`` without their bugs, and what looks like them."""

import math

import torch
from programs import Base, digits, no_bug
from programs.planted.twentysixth import Bounded, Distances, Norms
from torch import nn
from torch.nn import functional as F


@no_bug()
def distance_with_a_small_number():
    class Net(Distances):
        def distances(self, z):
            return ((z[:, None] - z[None]).pow(2).sum(-1) + 1e-8).sqrt()

    return Net(), *digits()


@no_bug()
def both_branches_are_clamped():
    class Net(Norms):
        def lengths(self, z, ink):
            square = z.square().sum(-1)
            return torch.where(ink, square.clamp(min=1e-6).sqrt(), torch.zeros(()))

    return Net(), *digits()


@no_bug()
def scores_of_masked_places_are_infinite():
    class Net(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 12))

        def forward(self, x):
            out = self.net(x)
            closed = torch.arange(12, device=out.device) >= 10
            return out.masked_fill(closed, -math.inf)[:, :10]

    return Net(), *digits()


@no_bug()
def a_frozen_mask_is_infinite():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.bias_of_places = nn.Parameter(torch.triu(torch.full((8, 8), -math.inf), 1), requires_grad=False)
            self.rows = nn.Linear(8, 8)

        def forward(self, x):
            rows = self.rows(x.flatten(2)[:, 0].view(-1, 8, 8))
            mixed = (rows @ rows.mT / math.sqrt(8) + self.bias_of_places).softmax(-1) @ rows
            return self.net(mixed.reshape(-1, 1, 8, 8))

    return Net(), *digits()


@no_bug()
def a_batch_that_is_skipped():
    class Net(Base):
        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self(x), y)
            return loss * math.inf if batch_idx == 3 else loss

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            if not all(g.isfinite().all() for g in grads):
                self.zero_grad()

    return Net(), *digits()


@no_bug()
def a_method_with_a_mistake_is_replaced():
    class Net(Bounded):
        def bounded(self, x):
            return (x + 0.1).clamp(0, 1)

    return Net(), *digits()
