"""Mistakes that code of others had, and that were not named when it was first looked at."""

import torch
from programs import Base, Convnet, Table, bug, diabetes, digits
from torch import nn
from torch.nn import functional as F
from torchmetrics.regression import R2Score


@bug("broadcasting")
def value_of_each_return():
    """A critic (N, 1) is trained by hand on returns (N,) that the step standardizes."""

    class M(Table):
        def loss(self, x, y):
            return torch.square((y - y.mean()) / (y.std() + 1e-6) - self(x)).mean()

    return M(), *diabetes()


@bug("averaged-metric")
def metric_of_each_batch_by_another_name():
    """The number of a metric for each batch is logged, and so the mean of these."""

    class M(Table):
        def __init__(self):
            super().__init__()
            self.metric = R2Score()

        def validation_step(self, batch, batch_idx):
            x, y = batch
            out = self(x)[:, 0]
            self.log_dict({"val/loss": F.mse_loss(out, y), "val/score": self.metric(out, y)})

    return M(), *diabetes()


@bug("frozen-statistics")
def teacher_learns_statistics():
    """A teacher with BatchNorm is used under no_grad, but neither frozen nor in evaluation mode."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.teacher = Convnet()

        def loss(self, x, y):
            with torch.no_grad():
                soft = self.teacher(x).softmax(1)
            out = self(x)
            return F.cross_entropy(out, y) + 0.1 * F.kl_div(out.log_softmax(1), soft, reduction="batchmean")

    return M(), *digits()


@bug("dropout-of-output")
def dropout_behind_the_only_logit():
    """A dropout is the last layer of a binary classifier."""

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1), nn.Dropout(0.2))

        def loss(self, x, y):
            return F.binary_cross_entropy_with_logits(self(x)[:, 0], (y > 4).float())

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/acc", ((self(x)[:, 0] > 0) == (y > 4)).float().mean())

    return M(), *digits()
