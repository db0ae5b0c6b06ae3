"""Bugs of modes and statistics."""

import torch
from programs import Base, bug, digits
from torch import nn


@bug("eval-in-training")
def eval_after_samples():
    """Eval() for samples at the start of the epoch, and never train() (pytorch-lightning#20177)."""

    class M(Base):
        def network(self):
            return nn.Sequential(
                nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)
            )

        def on_train_epoch_start(self):
            self.eval()
            with torch.no_grad():
                self(torch.zeros(4, 1, 8, 8))

    return M(), *digits()


@bug("eval-in-training")
def pretrained_in_eval():
    """A pretrained body comes in evaluation mode, and Lightning keeps it (pytorch-lightning#20216)."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3)
            ).eval()  # as from_pretrained does
            self.net = nn.Linear(64, 10)

        def forward(self, x):
            return self.net(self.body(x))

    return M(), *digits()


@bug("train-in-validation")
def train_in_validation():
    """Validation_step calls train(), so that BatchNorm learns from validation."""

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

        def validation_step(self, batch, batch_idx):
            self.train()
            super().validation_step(batch, batch_idx)

    return M(), *digits()


@bug("bn-statistics")
def bn_momentum_zero():
    """BatchNorm with momentum=0, meant as no momentum."""

    class M(Base):
        def network(self):
            return nn.Sequential(
                nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64, momentum=0.0), nn.ReLU(), nn.Linear(64, 10)
            )

    return M(), *digits()


@bug("bn-momentum")
def bn_momentum_keras():
    """BatchNorm with momentum=0.99 of Keras, which means the opposite."""

    class M(Base):
        def network(self):
            return nn.Sequential(
                nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64, momentum=0.99), nn.ReLU(), nn.Linear(64, 10)
            )

    return M(), *digits()
