"""Gradients that are NaN where the loss is a number, names that torch does not read, and schedules called by hand."""

import itertools

import torch
from programs import Base, LossOnly, Manual, bug, diabetes, digits
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset


class Distances(LossOnly):
    """Pairs of digits of one class are near, and others at a distance of 4 or more."""

    def network(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8))

    def distances(self, z):
        return (z[:, None] - z[None]).pow(2).sum(-1).sqrt()

    def loss(self, x, y):
        apart, same = self.distances(self(x)), y[:, None] == y[None]
        return torch.where(same, apart.square(), (4 - apart).clamp(min=0).square()).mean()


@bug("nonfinite-gradient")
def distance_of_each_to_itself():
    return Distances(), *digits()


@bug("nonfinite-gradient")
def norm_to_the_power_of_a_half():
    class Net(Distances):
        def distances(self, z):
            return ((z[:, None] - z[None]) ** 2).sum(-1) ** 0.5

    return Net(), *digits()


class Norms(LossOnly):
    """Rows of digits, of which those with little ink are left out."""

    def network(self):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))

    def loss(self, x, y):
        rows = x.reshape(-1, 8, 8)
        ink = rows.mean(-1) > rows.mean()
        z = self.net(rows) * ink[..., None]
        out = F.pad(self.lengths(z, ink), (0, 2)) + z.mean(1)[:, :10]
        return F.cross_entropy(out, y)

    def lengths(self, z, ink):
        return torch.where(ink, z.square().sum(-1).sqrt(), torch.zeros(()))


@bug("nonfinite-gradient")
def branch_that_where_leaves_out():
    return Norms(), *digits()


@bug("nonfinite-gradient")
def angle_of_each_with_itself():
    class Net(Distances):
        def distances(self, z):
            z = F.normalize(z, dim=-1)
            return torch.acos((z @ z.mT).clamp(-1, 1))

    return Net(), *digits()


@bug("nonfinite-gradient")
def not_a_number_from_the_sixth_step():
    class Net(Base):
        def loss(self, x, y):
            out = self(x)
            loss = F.cross_entropy(out, y)
            if self.training and self.global_step >= 5:
                loss = loss + 0.1 * (out - out.detach()).norm(dim=1).mean() + 0.1 * (out - out).square().sum().sqrt()
            return loss

    return Net(), *digits()


class Bounded(LossOnly):
    """Digits with noise."""

    def bounded(self, x):
        x = x + 0.1
        x.clamp(0, 1)
        return x

    def loss(self, x, y):
        return F.cross_entropy(self(self.bounded(x)), y)


@bug("no-effect")
def result_is_dropped_in_a_method_that_is_extended():
    class Net(Bounded):
        def bounded(self, x):
            return super().bounded(x) * 0.9

    return Net(), *digits()


class Deep(LossOnly):
    """Four linear layers, of which some are in the optimizer."""

    def network(self):
        sizes = (64, 16, 64, 64, 10)
        layers = [nn.Flatten()]
        for one, other in itertools.pairwise(sizes):
            layers += [nn.Linear(one, other), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def parts(self):
        return [self.net[1], self.net[7]]

    def configure_optimizers(self):
        return torch.optim.Adam([{"params": part.parameters()} for part in self.parts()], lr=1e-3)


@bug("in-no-optimizer")
def layers_between_are_left_out():
    return Deep(), *digits()


class Fades(LossOnly):
    """Its dropout, its rate and its rows of zeros change while it trains."""

    def network(self):
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10)
        )

    def on_train_epoch_start(self):
        self.fade(1 - self.current_epoch / 10)

    def fade(self, share):
        self.net[4].prob = 0.5 * share


@bug("unread-attribute")
def dropout_is_set_by_another_name():
    return Fades(), *digits()


@bug("unread-attribute")
def rate_of_the_optimizer_itself():
    class Net(Fades):
        def fade(self, share):
            self.optimizers().optimizer.lr = self.lr * share

    return Net(), *digits()


@bug("unread-attribute")
def rate_of_a_group_by_another_name():
    class Net(Fades):
        def fade(self, share):
            for group in self.trainer.optimizers[0].param_groups:
                group["learning_rate"] = self.lr * share

    return Net(), *digits()


@bug("unread-attribute")
def epsilon_of_a_norm():
    class Net(Fades):
        def fade(self, share):
            for part in self.modules():
                if isinstance(part, nn.BatchNorm1d):
                    part.epsilon = 1e-3

    return Net(), *digits()


@bug("unread-attribute")
def thawed_by_a_misspelled_name():
    class Net(Fades):
        def __init__(self):
            super().__init__()
            for p in self.net[1].parameters():
                p.requires_grad = False

        def fade(self, share):
            if self.current_epoch == 1:
                for p in self.net[1].parameters():
                    p.require_grad = True

    return Net(), *digits()


class Called(Manual):
    """Calls its schedule itself."""

    def training_step(self, batch, batch_idx):
        optimizer, loss = self.optimizers(), self.loss(*batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [self.schedule(optimizer)]

    def schedule(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


@bug("schedule-dead")
def schedule_of_epochs_by_hand():
    return Called(), *digits()


@bug("schedule-unit")
def cosine_of_epochs_by_hand():
    class Net(Called):
        def schedule(self, optimizer):
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)

    return Net(), *digits()


@bug("schedule-absolute")
def schedule_asks_the_trainer():
    class Net(Base):
        def rate(self, step):
            return self.lr * max(0.0, 1 - step / self.trainer.estimated_stepping_batches)

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Net(), *digits()


class Rows(Dataset):
    """Digits as rows of the length up to their last ink, and whether they are even."""

    def __init__(self, count, first=0):
        x, y = digits(loaded=False)[0].tensors
        self.rows = [
            (rows[: 8 - i % 4], int(label) % 2) for i, (rows, label) in enumerate(zip(x[:, 0], y, strict=True))
        ]
        self.rows = self.rows[first : first + count]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def sorted_rows(batch):
    rows = sorted((rows for rows, _ in batch), key=len, reverse=True)
    return pad_sequence(rows, True), torch.tensor([len(r) for r in rows]), torch.tensor([y for _, y in batch])


class Lines(LossOnly):
    """Reads rows up to their length."""

    def __init__(self):
        super().__init__()
        self.net, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 2)

    def loss(self, rows, lengths, y):
        packed = pack_padded_sequence(rows, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return F.cross_entropy(self.head(self.net(packed)[1][0]), y)


def loaders_of_rows(collate):
    train, val = Rows(400), Rows(200, 400)
    return DataLoader(train, 20, shuffle=True, collate_fn=collate), DataLoader(val, 20, collate_fn=collate)


@bug("parts-misaligned")
def sorted_without_their_labels():
    return Lines(), *loaders_of_rows(sorted_rows)


class Kept(LossOnly):
    """Remembers its losses for the mean of an epoch."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(*batch)
        self.remember(loss)
        return loss

    def remember(self, loss):
        self.losses.append(loss)

    def on_train_epoch_end(self):
        self.log("train/mean", torch.stack(self.losses).mean())
        self.losses = []


@bug("graph-kept")
def losses_are_kept_with_their_graphs():
    return Kept(), *digits()


@bug("graph-kept")
def losses_are_added_with_their_graphs():
    class Net(Kept):
        total = 0.0

        def remember(self, loss):
            self.total += loss

        def on_train_epoch_end(self):
            self.log("train/mean", self.total / 20)
            self.total = 0.0

    return Net(), *digits()


@bug("global-seed")
def each_epoch_begins_with_one_seed():
    class Net(LossOnly):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))

        def on_train_epoch_start(self):
            torch.manual_seed(42)

    return Net(), *digits()


class Critic(LossOnly):
    """Values of states, whose rewards are drawn in each step."""

    def network(self):
        return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))

    def values(self, x):
        return self(x)

    def loss(self, x, y):
        rewards = x[:, 2] * 2 + 0.1 * torch.randn(len(x))
        return (rewards - self.values(x)).square().mean()


@bug("broadcasting")
def rewards_minus_a_column_of_values():
    return Critic(), *diabetes()


@bug("normalized-over-batch")
def two_views_normalized_over_the_batch():
    class Net(LossOnly):
        over = 0

        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))

        def loss(self, x, y):
            one, other = (F.normalize(self(x + 0.1 * torch.randn_like(x)), dim=self.over) for _ in range(2))
            z = torch.cat([one, other])
            similar = (z @ z.T / 0.2).fill_diagonal_(-1e9)
            return F.cross_entropy(similar, torch.arange(len(z)).roll(len(x)))

    return Net(), *digits()
