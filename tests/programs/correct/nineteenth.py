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


@no_bug()
def loss_has_the_value_of_another_one():
    class Net(Base):
        def loss(self, x, y):
            out = self(x)
            surrogate, real = F.cross_entropy(out, y), (out.argmax(1) != y).float().mean()
            return surrogate + (real - surrogate).detach()

    return Net(), *digits()


@no_bug()
def penalty_keeps_its_gradient_and_loses_its_value():
    class Net(Base):
        def loss(self, x, y):
            penalty = self.net[1].weight.abs().sum()
            return F.cross_entropy(self(x), y) + 1e-3 * penalty - 1e-3 * penalty.item()

    return Net(), *digits()


@no_bug()
def weights_of_terms_are_numbers():
    class Net(Base):
        def loss(self, x, y):
            out = self(x)
            ce, aux = F.cross_entropy(out, y), out.square().mean()
            self.log("total", ce + aux.item())
            return ce + 0.1 * ce.item() / (aux.item() + 1e-8) * aux

    return Net(), *digits()


@no_bug()
def bound_has_the_entropy_of_its_weights():
    class Net(Base):
        def loss(self, x, y):
            out = self(x)
            q = out.softmax(1).detach()
            entropy = -(q * q.log()).sum(1).mean()
            return F.cross_entropy(out, y) - (q * out.log_softmax(1)).sum(1).mean() - 0.5 * entropy.item()

    return Net(), *digits()


@no_bug()
def running_mean_is_subtracted():
    class Net(Base):
        mean = 2.3

        def loss(self, x, y):
            loss = F.cross_entropy(self(x), y)
            self.mean = 0.9 * self.mean + 0.1 * loss.item()
            return loss - self.mean

    return Net(), *digits()


@no_bug()
def loss_of_a_frozen_network_is_subtracted():
    class Net(Distilled):
        def loss(self, x, y):
            reference = F.cross_entropy(self.teacher(x), y)
            return F.cross_entropy(self(x), y) - reference + 0.1 * reference.item()

    return Net(), *digits()


@no_bug()
def distance_to_a_fixed_point_is_expanded():
    class Net(Base):
        def loss(self, x, y):
            p, z = self(x), self(x + 0.1).detach()
            return F.cross_entropy(p, y) + p.square().mean() + z.square().mean() - 2 * (p * z).mean()

    return Net(), *digits()


@no_bug()
def term_is_trained_later():
    class Net(Base):
        def loss(self, x, y):
            out = self(x)
            term = out.square().mean()
            return F.cross_entropy(out, y) + 0.01 * (term.detach() if self.current_epoch < 1 else term)

    return Net(), *digits()


class Hidden(Base):
    """Two layers, and what may be between them."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.drop, self.act = nn.Linear(64, 128), nn.Linear(128, 10), nn.Dropout(0.4), nn.GELU()

    def network(self):
        return None


@no_bug()
def step_needs_one_of_two_outputs():
    class Net(Hidden):
        def forward(self, x):
            h = F.relu(self.fc1(x.flatten(1)))
            return self.fc2(h), self.drop(h)

        def loss(self, x, y):
            out, _ = self(x)
            return F.cross_entropy(out, y)

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.loss(*batch))

    return Net(), *digits()


@no_bug()
def features_are_kept():
    class Net(Hidden):
        def forward(self, x):
            h = F.relu(self.fc1(x.flatten(1)))
            self.features = [self.act(h)]
            return self.fc2(self.drop(h))

    return Net(), *digits()


@no_bug()
def dropout_is_an_option():
    class Net(Hidden):
        drops = False

        def forward(self, x):
            h = F.relu(self.fc1(x.flatten(1)))
            d = self.drop(h)
            return self.fc2(d if self.drops else h)

    return Net(), *digits()


@no_bug()
def activation_is_in_place():
    class Net(Hidden):
        def forward(self, x):
            h = self.fc1(x.flatten(1))
            nn.ReLU(inplace=True)(h)
            h = F.dropout(h, 0.0, self.training)
            return self.fc2(h)

    return Net(), *digits()


@no_bug()
def activations_are_counted():
    class Net(Hidden):
        def forward(self, x):
            h = self.fc1(x.flatten(1))
            self.alive = (F.relu(h).detach().numpy() > 0).mean()
            return self.fc2(self.act(h))

    return Net(), *digits()
