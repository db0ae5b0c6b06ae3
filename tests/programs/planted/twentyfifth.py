"""Returns of samples, means that are masked afterwards, rates that compound, and angles, indices and margins."""

import math
import random

import torch
from programs import Base, LossOnly, bug, digits, halves
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import MultiplicativeLR
from torch.utils.data import DataLoader
from torchmetrics import MeanAbsoluteError


class Policy(LossOnly):
    """Learns to take the action that is rewarded, in episodes of eight steps."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))

    def loss(self, x):
        policy = torch.distributions.Categorical(logits=self.net(x))
        action = policy.sample()
        rewards = (action == (x[..., 0] > 0)).float()
        returns = self.returns_of(rewards)
        return -(policy.log_prob(action) * (returns - returns.mean(0))).mean()

    def returns_of(self, rewards):
        returns, total = [], torch.zeros(len(rewards))
        for r in rewards.unbind(1):
            total = r + 0.9 * total
            returns.append(total)
        return torch.stack(returns, 1)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/right", (self.net(batch).argmax(-1) == (batch[..., 0] > 0)).float().mean())


def states():
    return halves(torch.randn(320, 8, 3, generator=torch.Generator().manual_seed(0)), split=256)


@bug("returns-of-past")
def returns_of_samples_are_those_of_the_past():
    return Policy(), *states()


@bug("returns-of-past")
def returns_of_each_step_are_those_of_the_past():
    class Net(Policy):
        def returns_of(self, rewards):
            return torch.stack(self.discounted([*rewards.unbind(1)]), 1)

        def discounted(self, rewards):
            returns = [rewards[0]]
            for r in rewards[1:]:
                returns.append(r + 0.9 * returns[-1])
            return returns

    return Net(), *states()


def gaps():
    """Windows of waves, and four further values, of which some are not observed."""
    g = torch.Generator().manual_seed(0)
    t = torch.arange(16) * 0.4 + 6 * torch.rand(320, 1, generator=g)
    series = torch.sin(t) + 2 + 0.1 * torch.randn(320, 16, generator=g)
    observed = (torch.rand(320, 4, generator=g) < 0.5).float()
    return halves(series[:, :12], series[:, 12:] * observed, observed, split=256)


class Gaps(LossOnly):
    """Forecasts series of which some values are not observed."""

    def network(self):
        return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))

    def loss(self, x, y, observed):
        return (F.l1_loss(self(x), y) * observed).sum() / observed.sum()

    def training_step(self, batch, batch_idx):
        return self.loss(*batch)

    def validation_step(self, batch, batch_idx):
        x, y, observed = batch
        self.log("val/error", ((self(x) - y).abs() * observed).sum() / observed.sum())


@bug("weights-of-mean")
def mean_error_is_masked():
    return Gaps(), *gaps()


@bug("weights-of-mean")
def mean_square_by_hand_is_masked():
    class Net(Gaps):
        def loss(self, x, y, observed):
            error = ((self(x) - y) ** 2).mean()
            return (observed * error).sum() / observed.sum()

    return Net(), *gaps()


@bug("weights-of-mean")
def mean_error_where_there_are_values():
    class Net(Gaps):
        def loss(self, x, y, observed):
            error = F.mse_loss(self(x), y)
            return torch.where(observed.bool(), error, torch.zeros(())).sum() / observed.sum()

    return Net(), *gaps()


class Warm(LossOnly):
    """Raises its rate in the first steps."""

    lr, warm_up = 0.1, 20

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def change(self, group, step):
        group["lr"] *= min(1.0, (step + 1) / self.warm_up)

    def on_train_batch_start(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            self.change(group, self.global_step)


@bug("rate-compounded")
def warm_up_multiplies_the_present_rate():
    return Warm(), *digits()


@bug("rate-compounded")
def warm_up_of_four_steps_multiplies_the_present_rate():
    class Net(Warm):
        warm_up = 4

    return Net(), *digits()


@bug("rate-compounded")
def decay_multiplies_the_present_rate():
    class Net(Warm):
        def change(self, group, step):
            group["lr"] *= 0.99**step

    return Net(), *digits()


@bug("rate-compounded")
def schedule_multiplies_the_present_rate():
    class Net(LossOnly):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = MultiplicativeLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Net(), *digits()


class Wind(LossOnly):
    """The direction of the wind, of pressures around a place."""

    def network(self):
        return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))

    def loss(self, x, angle):
        return F.mse_loss(self(x), torch.stack([angle.cos(), angle.sin()], -1))

    def error(self, out, angle):
        return (torch.atan2(out[:, 1], out[:, 0]) - angle).abs().mean()

    def validation_step(self, batch, batch_idx):
        x, angle = batch
        self.log("val/error", self.error(self(x), angle))


def winds(begin=0.0, unit=1.0):
    g = torch.Generator().manual_seed(0)
    angle = begin + 2 * math.pi * torch.rand(480, generator=g)
    bearing = torch.arange(6) / 6 * 2 * math.pi
    x = torch.cos(angle[:, None] - bearing) + 0.1 * torch.randn(480, 6, generator=g)
    return halves(x, unit * angle, split=320)


@bug("unwrapped-angle")
def angles_have_another_range():
    return Wind(), *winds()


@bug("unwrapped-angle")
def angles_are_compared_at_their_ends():
    class Net(Wind):
        def error(self, out, angle):
            return F.mse_loss(torch.atan2(out[:, 1], out[:, 0]), angle).sqrt()

    return Net(), *winds(begin=-math.pi)


@bug("unwrapped-angle")
def angles_in_degrees_have_another_range():
    class Net(Wind):
        def __init__(self):
            super().__init__()
            self.mae = MeanAbsoluteError()

        def loss(self, x, angle):
            return super().loss(x, torch.deg2rad(angle))

        def error(self, out, angle):
            self.mae(torch.rad2deg(torch.atan2(out[:, 1], out[:, 0])), angle)
            return self.mae

    return Net(), *winds(unit=180 / math.pi)


class Next(LossOnly):
    """The next of 20 items, of which 0 is padding."""

    def __init__(self):
        super().__init__()
        self.items, self.net = nn.Embedding(21, 16, padding_idx=0), nn.Linear(16, 21)

    def forward(self, x):
        return self.net(self.items(x).mean(1))

    def best(self, scores):
        return scores[:, 1:].topk(5, dim=-1).indices

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/hit", (self.best(self(x)) == y[:, None]).any(-1).float().mean())


def items():
    g = torch.Generator().manual_seed(0)
    x = torch.randint(1, 21, (480, 4), generator=g)
    return halves(x, x[:, -1] % 20 + 1, split=320)


@bug("shifted-indices")
def best_items_without_padding():
    return Next(), *items()


@bug("shifted-indices")
def best_item_without_padding():
    class Net(Next):
        def best(self, scores):
            return scores[:, 1:].argmax(1, keepdim=True)

    return Net(), *items()


class Margin(LossOnly):
    """Digits by the cosine of a class, with a margin."""

    def __init__(self):
        super().__init__()
        self.net, self.centers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16)), nn.Parameter(torch.randn(10, 16))

    def cosines(self, x):
        return F.normalize(self.net(x), dim=1) @ F.normalize(self.centers, dim=1).T

    def logits(self, cosine, y):
        return 10 * (cosine + 0.2 * F.one_hot(y, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.logits(self.cosines(x), y), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/acc", (self.cosines(x).argmax(1) == y).float().mean())


@bug("margin-sign")
def margin_is_added():
    return Margin(), *digits()


@bug("margin-sign")
def angle_is_made_smaller():
    class Net(Margin):
        def logits(self, cosine, y):
            rows, cosine = torch.arange(len(y)), cosine.clone()
            cosine[rows, y] = torch.cos(torch.acos(cosine[rows, y].clamp(-0.99, 0.99)) - 0.3)
            return 10 * cosine

    return Net(), *digits()


FILLER = [
    *("the", "film", "was", "set", "in", "paris", "then", "told", "by", "two"),
    *("friends", "who", "met", "on", "their", "train", "last", "year"),
]
GOOD, BAD = ["brilliant", "moving", "wonderful"], ["awful", "boring", "dull"]


def sentences(count, seed):
    """Words, and whether they are good, bad or neither."""
    rng, samples = random.Random(seed), []
    for _ in range(count):
        words, label = rng.choices(FILLER, k=rng.randint(6, 14)), rng.randrange(3)
        if label:
            words.insert(rng.randrange(len(words)), rng.choice(GOOD if label == 1 else BAD))
        samples.append((words, label))
    return samples


class Words(Base):
    """The mean of embeddings that are no padding."""

    first = 0

    def __init__(self):
        super().__init__()
        self.numbers = {w: i for i, w in enumerate(sorted({*FILLER, *GOOD, *BAD}), self.first)}
        self.embed = nn.Embedding(len(self.numbers) + 1, 16, padding_idx=0)
        self.net = nn.Linear(16, 3)

    def collate(self, samples):
        rows = [torch.tensor([self.numbers[w] for w in words]) for words, _ in samples]
        return pad_sequence(rows, batch_first=True), torch.tensor([label for _, label in samples])

    def forward(self, x):
        mask = (x != 0).float()
        return self.net((self.embed(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1))


def texts(module):
    train, val = sentences(320, 0), sentences(160, 1)
    return module, DataLoader(train, 32, collate_fn=module.collate), DataLoader(val, 32, collate_fn=module.collate)


@bug("padding-is-token")
def a_rare_word_is_the_padding():
    return texts(Words())


class Tasks(LossOnly):
    """Two targets of a table, whose errors have learned weights."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
        self.log_vars = nn.Parameter(torch.zeros(2))

    def weighted(self, errors):
        return (torch.exp(-self.log_vars) * errors).sum()

    def errors(self, x, y, sold):
        out = self.net(x)
        return torch.stack([F.mse_loss(out[:, 0], y), F.binary_cross_entropy_with_logits(out[:, 1], sold)])

    def training_step(self, batch, batch_idx):
        return self.weighted(self.errors(*batch))

    def validation_step(self, batch, batch_idx):
        self.log("val/error", self.errors(*batch).sum())


def houses():
    x = torch.randn(480, 10, generator=torch.Generator().manual_seed(0))
    return halves(x, x[:, 0] - x[:, 1] ** 2, (x[:, 2] + x[:, 3] > 0).float(), split=320)


@bug("learned-weight")
def nothing_holds_the_variances():
    return Tasks(), *houses()


@bug("learned-weight")
def nothing_holds_the_variance_of_one_task():
    class Net(Tasks):
        def weighted(self, errors):
            return errors[0] + torch.exp(-2 * self.log_vars[1]) * errors[1]

    return Net(), *houses()


@bug("learned-weight")
def nothing_holds_the_shares():
    class Net(Tasks):
        def weighted(self, errors):
            return (torch.sigmoid(self.log_vars) * errors).sum()

    return Net(), *houses()


class Residual(nn.Module):
    """Two layers, and what skips them."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        x = F.relu(self.one(x))
        x = self.other(x)
        return x + x


class Deep(LossOnly):
    """Digits by four blocks."""

    block = Residual

    def network(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), *(self.block() for _ in range(4)), nn.Linear(32, 10))


@bug("same-addend")
def input_of_a_block_is_overwritten():
    return Deep(), *digits()


@bug("same-addend")
def input_of_a_block_is_kept_too_late():
    class Block(Residual):
        def forward(self, x):
            x = self.one(F.relu(x))
            skipped = x
            x += skipped
            return self.other(x)

    class Net(Deep):
        block = Block

    return Net(), *digits()


class Penalized(LossOnly):
    """Digits with a penalty that grows."""

    warm_up = 5

    def weight(self):
        return min(1.0, self.current_epoch // self.warm_up)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        return F.cross_entropy(out, y) + 0.1 * self.weight() * out.square().mean()


@bug("whole-ramp")
def ramp_of_whole_numbers():
    return Penalized(), *digits()


@bug("whole-ramp")
def ramp_of_whole_steps():
    class Net(Penalized):
        def weight(self):
            beta = int(self.global_step / 1000)
            return min(beta, 2)

    return Net(), *digits()
