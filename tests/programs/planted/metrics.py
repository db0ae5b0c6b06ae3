"""Bugs of metrics and monitors."""

import torch
from programs import Base, bug, digits, loaders
from torch.nn import functional as F
from torchmetrics import Accuracy


@bug("metric-not-reset")
def metric_not_reset():
    """Compute() of a metric is logged by hand, without reset()."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.accuracy = Accuracy("multiclass", num_classes=10)

        def validation_step(self, batch, batch_idx):
            self.accuracy.update(self(batch[0]), batch[1])

        def on_validation_epoch_end(self):
            self.log("val/acc", self.accuracy.compute())

    return M(), *digits()


def _stopping(monitor):
    from lightning.pytorch.callbacks import EarlyStopping

    return lambda: [EarlyStopping(monitor, patience=10)]


@bug("monitor-mode", callbacks=_stopping("val/acc"))
def stops_at_worst():
    """EarlyStopping of an accuracy with the default mode=min."""

    return Base(), *digits()


@bug("skipped-steps")
def nan_batches_skipped():
    """Training_step returns None whenever the loss is NaN, which is in half of the batches."""

    class M(Base):
        def training_step(self, batch, batch_idx):
            loss = self.loss(*batch)
            return None if loss.isnan() else loss

    train, val = digits(loaded=False)
    train.tensors[0][:16, 0, 0, 0] = float("nan")
    return M(), *loaders(train, val)


@bug("nan-hidden")
def nan_to_num():
    """NaN of the loss is replaced by 0."""

    class M(Base):
        def loss(self, x, y):
            p = self(x).softmax(1)
            q = (p - p.detach()).clamp(max=0)
            each = F.cross_entropy(self(x), y, reduction="none") + 0 * (q / q.sum(1, keepdim=True)).sum(1)
            return torch.nan_to_num(each).mean()

    return M(), *digits()
