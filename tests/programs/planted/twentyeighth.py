"""Targets that are copied into trained networks, numbers of each split, values that are kept, counts of others."""

import copy
import random

import torch
from programs import (
    Base,
    Causal,
    LossOnly,
    Manual,
    Table,
    bug,
    digits,
    halves,
    loaders,
    segments,
    tokens,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class Followed(Base):
    """Is drawn to the outputs of a frozen copy, which ``sync`` updates from time to time."""

    def __init__(self):
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        if batch_idx % 25 == 24:
            self.sync()
        x, y = batch
        out = self.net(x)
        with torch.no_grad():
            aim = self.target(x).softmax(-1)
        return F.cross_entropy(out, y) + 0.1 * F.cross_entropy(out, aim)


@bug("average-copies")
def target_is_copied_into_the_network():
    class Net(Followed):
        def sync(self):
            self.net.load_state_dict(self.target.state_dict())

    return Net(), *digits()


@bug("average-copies")
def parameters_of_a_target_are_copied_into_the_network():
    class Net(Followed):
        @torch.no_grad()
        def sync(self):
            for p, q in zip(self.net.parameters(), self.target.parameters(), strict=True):
                p.data.copy_(0.1 * p.data + 0.9 * q.data)

    return Net(), *digits()


class Words(Dataset):
    """Sentences of 6 words of which one says the class; numbers them in the order of their first appearance."""

    def __init__(self, seed, vocab=None):
        draw = random.Random(seed)
        kinds = [draw.randrange(4) for _ in range(480)]
        texts = [[f"w{draw.randrange(20)}" for _ in range(5)] + [f"kind{k}"] for k in kinds]
        for text in texts:
            draw.shuffle(text)
        known = dict.fromkeys(word for text in texts for word in text)
        self.vocab = vocab or {word: i for i, word in enumerate(known)}
        self.rows = [(torch.tensor([self.vocab[w] for w in t]), k) for t, k in zip(texts, kinds, strict=True)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Bag(Base):
    """A classifier of bags of words."""

    def network(self):
        return nn.Sequential(nn.EmbeddingBag(24, 16), nn.ReLU(), nn.Linear(16, 4))


@bug("numbers-differ")
def each_split_numbers_its_words():
    return Bag(), *loaders(Words(0), Words(1))


class Marked(LossOnly):
    """Segments pictures by the overlap of probabilities."""

    dim = 1

    def network(self):
        layers = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1)
        return nn.Sequential(*layers)

    def loss(self, x, y):
        p, t = self(x).softmax(self.dim), F.one_hot(y, 3).movedim(-1, 1).float()
        inter, total = (p * t).sum((0, 2, 3)), (p + t).sum((0, 2, 3))
        return 1 - (2 * inter / (total + 1e-6)).mean()


@bug("softmax-of-batch")
def softmax_over_the_columns_of_pictures():
    class Net(Marked):
        dim = -1

    return Net(), *halves(*segments(), split=240)


class Cycled(Base):
    """Has a cycle of the learning rate over all of its training."""

    def total(self):
        return int(self.trainer.estimated_stepping_batches)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.total())
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@bug("schedule-unit", max_epochs=4, accumulate_grad_batches=4)
def schedule_counts_micro_batches():
    class Net(Cycled):
        def total(self):
            return self.trainer.max_epochs * 20

    return Net(), *digits()


class Noisy(Base):
    """Adds noise to its inputs, the same in each validation."""

    def loss(self, x, y):
        return F.cross_entropy(self(x + 0.3 * torch.randn_like(x)), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", F.cross_entropy(self(x + 0.3 * self.noise(x)), y))

    def noise(self, x):
        return torch.randn(x.shape, generator=self.generator)

    def on_validation_epoch_start(self):
        self.generator = torch.Generator().manual_seed(7)


@bug("global-seed")
def validation_seeds_training():
    class Net(Noisy):
        def noise(self, x):
            return torch.randn_like(x)

        def on_validation_epoch_start(self):
            torch.manual_seed(7)

    return Net(), *digits()


class Ranked(LossOnly):
    """Ranks the items that a user has chosen above others, drawn at random."""

    users, items, drawn = 60, 200, 200

    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(self.users, 8), nn.Embedding(self.items, 8)

    def score(self, user, item):
        return (self.user(user) * self.item(item)).sum(1)

    def loss(self, user, item):
        other = torch.randint(0, self.drawn, item.shape)
        return -F.logsigmoid(self.score(user, item) - self.score(user, other)).mean()


def choices():
    g = torch.Generator().manual_seed(0)
    user = torch.randint(0, 60, (1280,), generator=g)
    return halves(user, (user * 3 + torch.randint(0, 12, (1280,), generator=g)) % 200, split=960, batch=64)


@bug("drawn-from-others")
def negative_items_are_drawn_as_users():
    class Net(Ranked):
        drawn = 60

    return Net(), *choices()


class Gallery(Base):
    """Finds the nearest digits of a gallery."""

    def __init__(self):
        super().__init__()
        (x, y) = next(iter(digits(batch=200)[1]))
        self.register_buffer("pictures", x)
        self.register_buffer("labels", y)
        self.known = None

    def gallery(self):
        if self.known is None:
            self.known = F.normalize(self.net[:-1](self.pictures), dim=1)
        return self.known

    def validation_step(self, batch, batch_idx):
        x, y = batch
        near = (F.normalize(self.net[:-1](x), dim=1) @ self.gallery().T).argmax(1)
        self.log("val/acc", (self.labels[near] == y).float().mean())


@bug("cached-value")
def gallery_is_embedded_once():
    return Gallery(), *digits()


class Boxes(LossOnly):
    """Predicts the box of a bright rectangle, as center and size."""

    def network(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4), nn.Sigmoid())

    def corners_of(self, box):
        return corners(box)

    def loss(self, x, box):
        p = self(x)
        return F.l1_loss(p, box) + 1 - box_iou(self.corners_of(p), corners(box)).mean()


def corners(box):
    return torch.cat([box[:, :2] - box[:, 2:] / 2, box[:, :2] + box[:, 2:] / 2], 1)


def box_iou(a, b):
    size = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp_min(0)
    inter = size.prod(1)
    return inter / ((a[:, 2:] - a[:, :2]).prod(1) + (b[:, 2:] - b[:, :2]).prod(1) - inter + 1e-6)


def rectangles():
    g = torch.Generator().manual_seed(0)
    sides, x, box = torch.arange(8), torch.zeros(640, 1, 8, 8), torch.zeros(640, 4)
    for i in range(640):
        first, size = torch.randint(0, 4, (2,), generator=g), torch.randint(2, 5, (2,), generator=g)
        inside = [(sides >= a) & (sides < a + n) for a, n in zip(first, size, strict=True)]
        x[i, 0] = inside[1][:, None] * inside[0][None]
        box[i] = torch.cat([first + size / 2, size]) / 8
    return halves(x, box)


@bug("box-formats")
def predicted_boxes_stay_centers():
    class Net(Boxes):
        def corners_of(self, box):
            return box

    return Net(), *rectangles()


class Warmed(Base):
    """Warms up by a function, to 0.05."""

    def factor(self, step):
        return min(1.0, (step + 1) / 10)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@bug("schedule-absolute")
def function_returns_a_larger_rate():
    class Net(Warmed):
        def __init__(self):
            super().__init__()
            self.base_lr = 0.05

        def factor(self, step):
            return self.base_lr * min(1.0, (step + 1) / 10)

    return Net(), *digits()


class Views(LossOnly):
    """Compares two noisy views of each digit with those of the others."""

    dim = -1

    def network(self):
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))

    def loss(self, x, y):
        views = torch.stack([x + 0.2 * torch.randn_like(x) for _ in range(2)], 1).flatten(2)
        z = F.normalize(self(views), dim=self.dim)
        z = torch.cat([z[:, 0], z[:, 1]])
        scores = (z @ z.T / 0.2).fill_diagonal_(-1e9)
        return F.cross_entropy(scores, (torch.arange(len(z)) + len(x)) % len(z))


@bug("normalized-over-batch")
def vectors_are_normalized_over_views():
    class Net(Views):
        dim = 1

    return Net(), *digits()


class Pretrained(Bag):
    """Begins with vectors that were trained before, behind the initialization of all layers."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(24, 16)
        self.net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        self.apply(self.init)
        self.words.weight.data.copy_(torch.eye(24, 16))

    def init(self, layer):
        if isinstance(layer, nn.Embedding):
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, x):
        return self.net(self.words(x).mean(1))


@bug("loads-nothing")
def vectors_are_initialized_away():
    class Net(Pretrained):
        def __init__(self):
            super().__init__()
            self.words.weight.data.copy_(torch.eye(24, 16))
            self.apply(self.init)

    train = Words(0)
    return Net(), *loaders(train, Words(1, train.vocab))


class Decoder(nn.Module):
    """Writes a sequence one token at a time, from its true tokens or its own."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(13, 16), nn.GRUCell(16, 32), nn.Linear(32, 12)

    def forward(self, state, y, teacher_forcing=0.5):
        token, found = torch.full_like(y[:, 0], 12), []
        for t in range(y.shape[1]):
            state = self.cell(self.embed(token), state)
            found.append(self.out(state))
            token = y[:, t] if random.random() < teacher_forcing else found[-1].argmax(1)
        return torch.stack(found, 1)


class Reversed(LossOnly):
    """Reverses sequences."""

    forcing = 0.0

    def network(self):
        return Decoder()

    def __init__(self):
        super().__init__()
        self.embed, self.encoder = nn.Embedding(12, 16), nn.GRU(16, 32, batch_first=True)

    def state(self, x):
        return self.encoder(self.embed(x))[1][0]

    def loss(self, x, y):
        return F.cross_entropy(self.net(self.state(x), y).flatten(0, 1), y.flatten())

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(self.state(x), y, teacher_forcing=self.forcing)
        self.log("val/acc", (out.argmax(-1) == y).float().mean())


def reversals():
    x = tokens(6)
    return halves(x, x.flip(1))


@bug("forced-in-validation")
def half_of_the_tokens_are_true_in_validation():
    class Net(Reversed):
        forcing = 0.5

    return Net(), *reversals()


class Decayed(Manual):
    """Lowers the rates of two optimizers to 0 at the end of training."""

    per_batch = 2

    def training_step(self, batch, batch_idx):
        total = self.trainer.max_epochs * self.trainer.num_training_batches
        factor = max(0.0, 1 - self.global_step // self.per_batch / total)
        self.manual_backward(self.loss(*batch))
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * factor
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.05) for i in (1, 3)]


@bug("ramp-too-fast")
def rate_counts_the_steps_of_both_optimizers():
    class Net(Decayed):
        def training_step(self, batch, batch_idx):
            total = self.trainer.max_epochs * self.trainer.num_training_batches
            factor = max(0.0, 1 - self.global_step / total)
            self.manual_backward(self.loss(*batch))
            for optimizer in self.optimizers():
                for group in optimizer.param_groups:
                    group["lr"] = 0.05 * factor
                optimizer.step()
                optimizer.zero_grad()

    return Net(), *digits()


class Masked(Causal):
    """Predicts the tokens that are masked."""

    causal, mask_id = False, 12

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 32)

    def targets(self, x, chosen):
        return x.masked_fill(~chosen, -100)

    def loss(self, x, y):
        chosen = torch.rand(x.shape) < 0.15
        out = self(x.masked_fill(chosen, self.mask_id))
        return F.cross_entropy(out.flatten(0, 1), self.targets(x, chosen).flatten())


@bug("visible-targets")
def all_tokens_are_targets_of_a_masked_model():
    class Net(Masked):
        def targets(self, x, chosen):
            return x

    return Net(), *halves(tokens(), tokens())


class Scaled(nn.Module):
    """Scales channels; the places of a sample share their factors."""

    places = 8

    def __init__(self):
        super().__init__()
        self.log_scale, self.shift = (nn.Parameter(torch.zeros(2, 1)) for _ in range(2))

    def forward(self, x):
        return (x + self.shift) * self.log_scale.exp(), (self.places * self.log_scale.sum()).expand(len(x))


class Density(LossOnly):
    """The likelihood of series of two channels under a normal distribution of what they are scaled to."""

    def network(self):
        return Scaled()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def loss(self, x):
        z, log_det = self.net(x)
        return (0.5 * z.square().sum((1, 2)) - log_det).mean()


def series():
    g = torch.Generator().manual_seed(0)
    return halves(1 + torch.tensor([[3.0], [0.5]]) * torch.randn(640, 2, 8, generator=g))


@bug("log-determinant")
def determinant_of_one_place():
    class Net(Density):
        def network(self):
            layer = Scaled()
            layer.places = 1
            return layer

    return Net(), *series()


def shop(seed, shift, days=360):
    """Sales of each day, and means of the last 5 days and of all, up to the day itself or the one before."""
    g = torch.Generator().manual_seed(seed)
    y, mean = 5 + torch.randn(days, generator=g) + 2 * torch.sin(torch.arange(days) / 7), 0.0
    weighted = []
    for value in y.tolist():
        mean = 0.8 * mean + 0.2 * value
        weighted.append(mean)
    columns = y.unfold(0, 5, 1).mean(1)[: days - 4 - shift], torch.tensor(weighted)[4 : days - shift]
    return torch.stack([*columns, *torch.randn(8, days - 4 - shift, generator=g)], 1), y[4 + shift :]


def sales(*, shift):
    """Those of three shops, behind each other."""
    x, y = (torch.cat(parts) for parts in zip(*(shop(seed, shift) for seed in range(3)), strict=True))
    return halves((x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std(), split=700)


@bug("later-targets")
def rolling_mean_has_the_day_itself():
    return Table(), *sales(shift=0)
