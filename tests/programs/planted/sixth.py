"""Bugs that were written when the checks of ``fifth.py`` were there: docs/diagnosis.md has their first count."""

import torch
from programs import Base, Causal, LossOnly, Table, bug, diabetes, digits, halves, loaders, mlp, sequences, tokens
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler


@bug("in-no-optimizer")
def head_without_optimizer():
    """configure_optimizers passes the body only."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.net, self.head = nn.Sequential(mlp(64, 64, 32), nn.ReLU()), nn.Linear(32, 10)

        def forward(self, x):
            return self.head(self.net(x))

        def configure_optimizers(self):
            return torch.optim.Adam(self.net.parameters(), self.lr)

    return M(), *digits()


@bug("hidden-unused")
def state_of_the_first_layer():
    """h[0] of a recurrent network of two layers is the first layer."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.body = nn.Linear(16, 4), nn.GRU(5, 16, num_layers=2, batch_first=True)

        def forward(self, x):
            return self.net(self.body(x)[1][0])

    return M(), *halves(*sequences())


@bug("same-sample")
def index_is_ignored():
    """__getitem__ returns the first sample for each index."""

    class First(Dataset):
        def __init__(self, part):
            self.part = part

        def __len__(self):
            return len(self.part)

        def __getitem__(self, index):
            return self.part[0]

    train, val = digits(loaded=False)
    return Base(), *loaders(First(train), val)


@bug("unsaved-state")
def statistics_in_an_attribute():
    """A running mean that evaluation uses is a plain tensor, so it is in no checkpoint."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.mean = torch.zeros(64)

        def forward(self, x):
            x = x.flatten(1)
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return self.net((x - self.mean) * 2)

    return M(), *digits()


def imbalanced(count=640):
    x, y = next(iter(DataLoader(digits(1200, loaded=False)[0], 1200)))
    rows = torch.cat([(y == 0).nonzero()[:, 0], *((y == k).nonzero()[: 6 * k, 0] for k in range(1, 10))])
    return x[rows], y[rows]


@bug("sampler-weights")
def rare_classes_drawn_less():
    """Samples are drawn in proportion to the size of their class, not to its inverse."""
    x, y = imbalanced()
    counts = y.bincount().float()
    sampler = WeightedRandomSampler(counts[y], len(y))
    return Base(), DataLoader(TensorDataset(x, y), 32, sampler=sampler), digits()[1]


@bug("class-weights")
def weights_are_the_counts():
    """Cross-entropy weights frequent classes most."""
    x, y = imbalanced()

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            counts = y.bincount().float()
            self.criterion = nn.CrossEntropyLoss(weight=counts / counts.sum() * 10)

        def loss(self, x, y):
            return self.criterion(self(x), y)

    return M(), *loaders(TensorDataset(x, y), digits(loaded=False)[1])


@bug("padding-is-token")
def padding_index_is_a_token():
    """padding_idx=0 is kept, but 0 is a token of this vocabulary."""

    class M(Causal):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(12, 32, padding_idx=0)

    t = tokens()
    return M(), *halves(t[:, :-1], t[:, 1:])


@bug("dropout-of-output")
def dropout_after_the_head():
    """The last layer's output passes a dropout before the loss."""

    class M(Base):
        def network(self):
            return nn.Sequential(mlp(), nn.Dropout(0.3))

    return M(), *digits()


@bug("adapter-base")
def base_of_adapter_is_trained():
    """LoRA whose frozen matrix is not frozen."""

    class Lora(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.lora_a = nn.Parameter(torch.randn(4, base.in_features) / 8)
            self.lora_b = nn.Parameter(torch.zeros(base.out_features, 4))

        def forward(self, x):
            return self.base(x) + x @ self.lora_a.T @ self.lora_b.T

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), Lora(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 10))

    return M(), *digits()


@bug("padding-in-loss")
def loss_of_padding():
    """The batch has a mask of padding, which the loss of tokens does not use."""

    class M(Causal):
        def loss(self, batch):
            x = batch["input_ids"]
            return F.cross_entropy(self(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.loss(batch))

    t = tokens(10)
    lengths = torch.randint(3, 8, (640,), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(10) < lengths[:, None]).long()
    rows = [{"input_ids": a, "attention_mask": b} for a, b in zip(t * mask, mask, strict=True)]
    return M(), *loaders(rows[:480], rows[480:])


@bug("unscaled-input")
def bytes_not_scaled():
    """Pictures of 0 to 255 go to the first convolution as they are."""
    x = torch.randint(0, 256, (640, 3, 8, 8), generator=torch.Generator().manual_seed(0)).float()

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))

    return M(), *halves(x, (x[:, 0].mean((1, 2)) / 64).long())


@bug("unscaled-input")
def income_beside_age():
    """A column in the tens of thousands is not standardized."""
    x, y = next(iter(DataLoader(diabetes(loaded=False)[0], 320)))
    return Table(), *halves(x * torch.tensor([1.0] * 9 + [50_000.0]), y, split=240)


@bug("misspelled-hook")
def validation_hook_of_another_name():
    class M(Base):
        def on_val_epoch_end(self):
            self.log("val/done", 1.0)

    return M(), *digits()


@bug("no-effect")
def detach_without_assignment():
    """hidden.detach() is called for its effect, of which it has none."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.body, self.aux = nn.Linear(32, 10), mlp(64, 32, 32), nn.Linear(32, 2)

        def loss(self, x, y):
            hidden = self.body(x)
            main = F.cross_entropy(self.net(hidden), y)
            hidden.detach()
            return main + F.cross_entropy(self.aux(hidden), y % 2)

    return M(), *digits()


@bug("masked-matters")
def bidirectional_tagger_without_lengths():
    """A bidirectional network reads padding, from which its backward direction begins."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.body = nn.Linear(32, 4), nn.LSTM(5, 16, batch_first=True, bidirectional=True)

        def loss(self, x, lengths, y):
            return F.cross_entropy(self.net(self.body(x)[0].mean(1)), y)

    x, y = sequences()
    lengths = torch.randint(5, 13, (len(x),), generator=torch.Generator().manual_seed(0))
    return M(), *halves(x * (torch.arange(12) < lengths[:, None])[..., None], lengths, y)


@bug("schedule-dropped")
def warm_up_not_returned():
    """A warm-up by LambdaLR is created in configure_optimizers, and forgotten."""

    class M(Base):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), self.lr)
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 20))
            return {"optimizer": optimizer}

    return M(), *digits()


@bug("target-column")
def one_hot_in_the_inputs():
    x, y = next(iter(DataLoader(digits(loaded=False)[0], 640)))
    x = torch.cat([x.flatten(1), F.one_hot(y, 10).float()], 1)

    class M(Base):
        def network(self):
            return mlp(74)

    return M(), *halves(x, y)


@bug("threshold-of-logits")
def rounded_logits():
    """Several labels: predictions are logits.round()."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.criterion = nn.BCEWithLogitsLoss()

        def loss(self, x, y):
            return self.criterion(self(x), F.one_hot(y, 10).float())

        def validation_step(self, batch, batch_idx):
            out, y = self(batch[0]), F.one_hot(batch[1], 10).float()
            self.log("val/loss", self.criterion(out, y))
            self.log("val/acc", (torch.round(out) == y).float().mean())

    return M(), *digits()


@bug("same-output")
def dropout_of_everything():
    """Dropout with p=1."""

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(1.0), nn.Linear(64, 10))

    return M(), *digits()
