"""Bugs of a list that a reviewer wrote, of kinds that the checks saw in one form only."""

import numpy as np
import torch
from programs import Base, Table, bug, diabetes, digits, loaders, mlp
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


@bug("bn-momentum")
def momentum_is_the_second_argument():
    class Net(Base):
        def network(self):
            norm = nn.BatchNorm1d(64, 0.8)
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), norm, nn.ReLU(), nn.Linear(64, 10))

    return Net(), *digits()


@bug("missing-targets")
def missing_values_are_minus_one():
    class Net(Two):
        def loss(self, x, y):
            return F.mse_loss(self(x), torch.nan_to_num(y, nan=-1.0))

    return Net(), *loaders(*with_gaps(*diabetes(loaded=False)))


@bug("missing-targets")
def missing_values_are_in_a_difference():
    class Net(Two):
        def loss(self, x, y):
            y = torch.where(y.isnan(), torch.full_like(y, -9.0), y)
            return (self(x) - y).abs().mean()

    return Net(), *loaders(*with_gaps(*diabetes(loaded=False)))


@bug("unread-samples")
def length_is_that_of_the_first_sample():
    class Lines(Rows):
        def __len__(self):
            return len(self.rows[0]) * 16

    return Base(), *loaders(*(Lines([*part]) for part in digits(loaded=False)))


@bug("unread-samples")
def length_is_that_of_the_first_path():
    class Files(Rows):
        def __len__(self):
            return len(self.rows[0])

        def __getitem__(self, i):
            return store[self.rows[i]]

    parts = zip(("train", "validation"), digits(loaded=False), strict=True)
    store = {f"/data/pictures/{name}/{i:028d}": part[i] for name, part in parts for i in range(len(part))}
    return Base(), *loaders(*(Files([k for k in store if f"/{name}/" in k]) for name in ("train", "validation")))


class Distilled(Base):
    """Learns of a teacher, too."""

    temperature = 4.0

    def __init__(self):
        super().__init__()
        self.teacher = mlp(hidden=128).requires_grad_(False).eval()


@bug("teacher-temperature")
def targets_alone_are_softened():
    class Net(Distilled):
        def loss(self, x, y):
            with torch.no_grad():
                soft = (self.teacher(x) / self.temperature).softmax(1)
            out = self(x)
            return 0.5 * F.cross_entropy(out, y) + 0.5 * F.cross_entropy(out, soft) * self.temperature**2

    return Net(), *digits()


@bug("teacher-temperature")
def targets_of_a_product_are_softened():
    class Net(Distilled):
        def soften(self, logits):
            return torch.softmax(logits * 0.25, dim=-1)

        def loss(self, x, y):
            goal, out = self.soften(self.teacher(x)), self(x)
            return F.cross_entropy(out, y) - (goal * torch.log_softmax(out, dim=-1)).sum(1).mean()

    return Net(), *digits()


@bug("teacher-temperature")
def probabilities_of_the_student_are_softened():
    class Net(Distilled):
        def loss(self, x, y):
            out = self(x)
            error = F.mse_loss(F.softmax(out / self.temperature, -1), F.softmax(self.teacher(x), -1))
            return F.cross_entropy(out, y) + error

    return Net(), *digits()


@bug("kl-reduction")
def divergence_is_divided_by_the_classes():
    class Net(Distilled):
        def loss(self, x, y):
            out, t = self(x), self.temperature
            with torch.no_grad():
                soft = F.softmax(self.teacher(x) / t, 1)
            return 0.5 * F.cross_entropy(out, y) + 0.5 * nn.KLDivLoss()(F.log_softmax(out / t, 1), soft) * t**2

    return Net(), *digits()


@bug("kl-reduction")
def divergence_of_all_places_is_averaged():
    class Net(Base):
        def loss(self, x, y):
            out, other = self(x), self(x + 0.1 * torch.randn_like(x)).detach()
            each = F.kl_div(out.log_softmax(1), other.log_softmax(1), reduction="none", log_target=True)
            return F.cross_entropy(out, y) + each.mean()

    return Net(), *digits()


@bug("constant-term")
def penalty_is_computed_without_gradients():
    class Net(Base):
        @torch.no_grad()
        def norm(self):
            return sum(p.square().sum() for p in self.parameters())

        def loss(self, x, y):
            return F.cross_entropy(self(x), y) + 1e-3 * self.norm()

    return Net(), *digits()


@bug("constant-term")
def penalty_is_a_number():
    class Net(Table):
        def loss(self, x, y):
            return F.mse_loss(self(x)[:, 0], y) + 0.1 * float(sum(p.abs().sum() for p in self.parameters()))

    return Net(), *diabetes()


@bug("constant-term")
def penalty_is_computed_by_numpy():
    class Net(Base):
        def loss(self, x, y):
            w = self.net[1].weight.detach().cpu().numpy()
            loss = F.cross_entropy(self(x), y)
            loss += 0.01 * np.linalg.norm(w.T @ w - np.eye(w.shape[1]))
            return loss

    return Net(), *digits()


@bug("constant-term")
def entropy_is_a_number():
    class Net(Base):
        def loss(self, x, y):
            out = self(x)
            entropy = -(out.softmax(1) * out.log_softmax(1)).sum(1).mean()
            return F.cross_entropy(out, y) - 0.1 * entropy.item()

    return Net(), *digits()


@bug("constant-term")
def stacked_penalty_has_no_gradient():
    class Net(Base):
        @torch.inference_mode()
        def orthogonality(self, w):
            return (w.T @ w - torch.eye(w.shape[1])).square().mean()

        def loss(self, x, y):
            return torch.stack([F.cross_entropy(self(x), y), self.orthogonality(self.net[1].weight)]).sum()

    return Net(), *digits()


class Hidden(Base):
    """Two layers, and what may be between them."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.drop, self.act = nn.Linear(64, 128), nn.Linear(128, 10), nn.Dropout(0.4), nn.GELU()

    def network(self):
        return None


@bug("unused-value")
def dropout_is_passed_by():
    class Net(Hidden):
        def forward(self, x):
            h = F.relu(self.fc1(x.flatten(1)))
            d = self.drop(h)  # noqa: F841
            return self.fc2(h)

    return Net(), *digits()


@bug("unused-value")
def activation_is_overwritten():
    class Net(Hidden):
        def forward(self, x):
            h = self.fc1(x.flatten(1))
            a = self.act(h)
            a = self.drop(h)
            return self.fc2(a)

    return Net(), *digits()


@bug("unused-value")
def normalized_values_are_passed_by():
    class Net(Hidden):
        def forward(self, x):
            h = self.fc1(x.flatten(1))
            n = F.layer_norm(h, (128,))  # noqa: F841
            return self.fc2(F.relu(h))

    return Net(), *digits()
