"""Arguments that no code reads: in a file of its own, as the whole file is searched for them."""

import lightning as L
import torch
from programs import Base, bug, digits, loaders
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


@bug("unread-argument")
def dropout_is_not_read():
    class Net(L.LightningModule):
        def __init__(self, hidden=64, drop_rate=0.5, lr=1e-2):
            super().__init__()
            self.net = nn.Sequential(
                nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 10)
            )
            self.lr = lr

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val_loss", F.cross_entropy(self.net(x), y))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=self.lr)

    return Net(), *digits()


@bug("unread-argument")
def rate_is_not_read():
    class Net(L.LightningModule):
        def __init__(self, hidden=64, learning_rate=1e-2, weight_decay=1e-2):
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val_loss", F.cross_entropy(self.net(x), y))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=self.hparams.weight_decay)

    return Net(), *digits()


@bug("unread-argument")
def weights_of_classes_are_kept_and_not_read():
    class Net(Base):
        def __init__(self, weights):
            super().__init__()
            self.register_buffer("class_weights", weights)

        def loss(self, x, y):
            return F.cross_entropy(self(x), y)

    train, val = digits(loaded=False)
    x, y = train.tensors
    keep = (y != 3) | (torch.arange(len(y)) % 6 == 0)
    x, y = x[keep], y[keep]
    return Net(len(y) / 10 / torch.bincount(y, minlength=10).float()), *loaders(TensorDataset(x, y), val)
