"""Mistakes that code of others had, and that were not named when it was first looked at."""

import torch
from programs import Table, bug, diabetes
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
