"""The programs of ``planted/eighteenth.py`` without their bugs, and others that look like them."""

import torch
from programs import Base, Table, diabetes, digits, loaders, mlp, no_bug
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


@no_bug()
def momentum_is_named():
    class Net(Base):
        def network(self):
            norm = nn.BatchNorm1d(64, 1e-2, 0.2)
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), norm, nn.ReLU(), nn.Linear(64, 10))

    return Net(), *digits()


@no_bug()
def missing_values_are_left_out_afterwards():
    class Net(Two):
        def loss(self, x, y):
            known = ~y.isnan()
            return torch.where(known, (self(x) - y.nan_to_num(-9.0)).square(), 0.0).sum() / known.sum()

    return Net(), *loaders(*with_gaps(*diabetes(loaded=False)))


@no_bug()
def missing_values_weigh_nothing():
    class Net(Two):
        def loss(self, x, y):
            weights = (~y.isnan()).float()
            errors = F.smooth_l1_loss(self(x), y.nan_to_num(-1.0), reduction="none")
            return (errors * weights).mean() / weights.mean()

    return Net(), *loaders(*with_gaps(*diabetes(loaded=False)))


@no_bug()
def samples_are_mixed_with_the_second_half_of_a_list():
    class Pairs(Rows):
        def __len__(self):
            return len(self.rows) // 2

        def __getitem__(self, i):
            (x, y), (u, _) = self.rows[i], self.rows[i + len(self)]
            return x + 0.1 * u, y

    return Base(), *loaders(*(Pairs([*part]) for part in digits(loaded=False)))


@no_bug()
def every_third_of_a_list_begins_a_sample():
    class Threes(Rows):
        def __len__(self):
            return len(self.rows) // 3

        def __getitem__(self, i):
            return torch.stack([self.rows[3 * i + k][0] for k in range(3)]).mean(0), self.rows[3 * i][1]

    return Base(), *loaders(*(Threes([*part]) for part in digits(loaded=False)))


@no_bug()
def length_is_bounded_by_a_constant():
    class Few(Rows):
        def __len__(self):
            return min(len(self.rows), LIMIT)

    return Base(), *loaders(*(Few([*part]) for part in digits(loaded=False)))


LIMIT = 200


class Distilled(Base):
    """Learns of a teacher, too."""

    temperature = 4.0

    def __init__(self):
        super().__init__()
        self.teacher = mlp(hidden=128).requires_grad_(False).eval()


@no_bug()
def teacher_and_student_are_softened_alike():
    class Net(Distilled):
        def soft(self, logits):
            return (logits * (1 / self.temperature)).log_softmax(1)

        def loss(self, x, y):
            out = self(x)
            kd = F.kl_div(self.soft(out), self.soft(self.teacher(x)), reduction="batchmean", log_target=True)
            return F.cross_entropy(out, y) + kd * self.temperature**2

    return Net(), *digits()


@no_bug()
def teacher_is_sharper_than_the_student():
    class Net(Distilled):
        def loss(self, x, y):
            s, t = self(x), self.teacher(x)
            return -(F.softmax(t / 0.04, 1) * F.log_softmax(s / 0.1, 1)).sum(1).mean()

    return Net(), *digits()


@no_bug()
def pseudo_labels_are_sharpened():
    class Net(Distilled):
        def loss(self, x, y):
            s = self(x)
            with torch.no_grad():
                goal = F.softmax(self.teacher(x) / 0.5, 1)
            return F.cross_entropy(s, y) + F.mse_loss(s.softmax(1), goal)

    return Net(), *digits()


@no_bug()
def soft_samples_of_a_policy_are_rewarded():
    class Net(Distilled):
        def loss(self, x, y):
            s = self(x)
            with torch.no_grad():
                q = ((s - torch.empty_like(s).exponential_().log()) / self.temperature).softmax(1)
            return F.cross_entropy(s, y) - 0.01 * (q * s.log_softmax(1)).sum(1).mean()

    return Net(), *digits()


@no_bug()
def divergence_is_multiplied_by_the_classes():
    class Net(Distilled):
        def loss(self, x, y):
            out, t = self(x), self.temperature
            s = F.log_softmax(out / t, 1)
            kd = F.kl_div(s, F.softmax(self.teacher(x) / t, 1), reduction="mean") * out.shape[1]
            return F.cross_entropy(out, y) + kd * t**2

    return Net(), *digits()


@no_bug()
def divergence_is_the_whole_loss():
    class Net(Base):
        def loss(self, x, y):
            return F.kl_div(self(x).log_softmax(1), 0.9 * F.one_hot(y, 10).float() + 0.01)

    return Net(), *digits()
