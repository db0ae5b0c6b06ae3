"""Common mistakes of a further set, which no check named."""

import numpy as np
import torch
from programs import Base, LossOnly, bug, digits, halves, loaders, mlp
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Pretrained(Base):
    """A head on a frozen encoder, whose weights are of a state with a prefix or without."""

    prefix = "encoder."

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))
        self.encoder.load_state_dict(self.known(), strict=False)
        self.encoder.requires_grad_(False)
        self.net = nn.Linear(32, 10)

    def known(self):
        g = torch.Generator().manual_seed(0)
        shapes = {"1.weight": (32, 64), "1.bias": (32,), "3.weight": (32, 32), "3.bias": (32,)}
        return {self.prefix + name: torch.randn(shape, generator=g) / 4 for name, shape in shapes.items()}

    def forward(self, x):
        return self.net(self.encoder(x))


@bug("loads-nothing")
def state_with_a_prefix_is_not_loaded():
    return Pretrained(), *digits()


@bug("loads-nothing")
def loaded_weights_are_drawn_again():
    def init(part):
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)

    class M(Pretrained):
        prefix = ""

        def __init__(self):
            super().__init__()
            self.encoder.load_state_dict(self.known())
            self.apply(init)

    return M(), *digits()


def scans(patients=60, each=10):
    """Pictures of patients and their diagnosis, in the order of patients."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (patients,), generator=g)
    x = torch.randn(patients, 40, generator=g)
    x[:, 0] += y
    x = x.repeat_interleave(each, 0)
    return x + 0.3 * torch.randn(x.shape, generator=g), y.repeat_interleave(each)


class Scans(Base):
    def network(self):
        return mlp(40, 32, 2)


@bug("group-overlap")
def scans_of_patients_in_both():
    x, y = scans()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    return Scans(), *halves(x[order], y[order])


def shops(*, honest):
    """Sales of shops, beside the mean of each shop over all rows, or over other rows."""
    g = torch.Generator().manual_seed(0)
    shop, x = torch.randint(0, 150, (640,), generator=g), torch.randn(640, 3, generator=g)
    y = x[:, 0] + torch.randn(640, generator=g)
    before = torch.arange(640) < 160
    used = torch.ones(640, dtype=torch.bool) if not honest else before
    sums = torch.zeros(150).index_add_(0, shop[used], y[used])
    means = sums / torch.bincount(shop[used], minlength=150).clamp(min=1)
    x = torch.cat([x, means[shop][:, None]], 1)
    return (x, y) if not honest else (x[~before], y[~before])


class Sales(LossOnly):
    def network(self):
        return mlp(4, 32, 1)

    def loss(self, x, y):
        return F.mse_loss(self(x)[:, 0], y)


@bug("held-out-labels")
def shops_are_encoded_by_all_their_sales():
    return Sales(), *halves(*shops(honest=False))


class Ratings(LossOnly):
    """Factors of users and items."""

    def __init__(self):
        super().__init__()
        self.net = None
        self.users, self.items = nn.Embedding(40, 8), nn.Embedding(30, 8)

    def loss(self, user, item, y):
        return F.mse_loss((self.users(user) * self.items(item)).sum(1), y)

    def training_step(self, batch, batch_idx):
        return self.loss(*batch)

    def network(self):
        return None


def ratings(count=900):
    g = torch.Generator().manual_seed(0)
    user, item = torch.randint(0, 40, (count,), generator=g), torch.randint(0, 30, (count,), generator=g)
    factors = torch.randn(40, 8, generator=g), torch.randn(30, 8, generator=g)
    return user, item, (factors[0][user] * factors[1][item]).sum(1)


def numbered(ids):
    """The number of each, in the order in which they first appear."""
    known = {}
    return torch.tensor([known.setdefault(int(i), len(known)) for i in ids])


@bug("numbered-apart")
def users_are_numbered_in_each_split():
    user, item, y = ratings()
    parts = [TensorDataset(numbered(user[rows]), item[rows], y[rows]) for rows in (slice(600), slice(600, None))]
    return Ratings(), *loaders(*parts)


class Boxes(Base):
    """Finds one rectangle, by the ratio of the common area to both."""

    corners = False

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 4), nn.Sigmoid())

    def overlap(self, a, b):
        if self.corners:
            a, b = (torch.cat([t[:, :2] - t[:, 2:] / 2, t[:, :2] + t[:, 2:] / 2], 1) for t in (a, b))
        sides = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0)
        common = sides.prod(1)
        areas = [(t[:, 2:] - t[:, :2]).prod(1) for t in (a, b)]
        return common / (areas[0] + areas[1] - common).clamp(min=1e-6)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        return (1 - self.overlap(out, y)).mean() + (out - y).abs().mean()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/overlap", self.overlap(self(x), y).mean())


def rectangles(count=640, size=12):
    g = torch.Generator().manual_seed(0)
    sides = torch.rand(count, 2, generator=g) * 0.3 + 0.2
    middle = sides / 2 + torch.rand(count, 2, generator=g) * (1 - sides)
    at = (torch.arange(size) + 0.5) / size
    inside = [(at[None] - middle[:, i : i + 1]).abs() < sides[:, i : i + 1] / 2 for i in (0, 1)]
    x = (inside[1][:, :, None] & inside[0][:, None]).float() + 0.1 * torch.randn(count, size, size, generator=g)
    return x, torch.cat([middle, sides], 1)


@bug("box-format")
def area_of_centers_and_sides():
    return Boxes(), *halves(*rectangles())


class Sets(LossOnly):
    """A transformer over a set of numbers, with a token of its own before them."""

    inverted = True

    def __init__(self):
        super().__init__()
        self.embed, self.own, self.net = nn.Embedding(30, 32), nn.Parameter(torch.zeros(1, 1, 32)), nn.Linear(32, 1)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def loss(self, x, y):
        hidden = torch.cat([self.own.expand(len(x), -1, -1), self.embed(x)], 1)
        mask = F.pad(x != 0 if self.inverted else x == 0, (1, 0))
        return F.mse_loss(self.net(self.body(hidden, src_key_padding_mask=mask)[:, 0])[:, 0], y)


def sets(count=640):
    g = torch.Generator().manual_seed(0)
    sizes = torch.randint(3, 10, (count,), generator=g).tolist()
    rows = [torch.randint(1, 30, (size,), generator=g) for size in sizes]
    return [(row, row.float().mean() / 15) for row in rows]


def filled(rows):
    x, y = zip(*rows, strict=True)
    return pad_sequence(x, batch_first=True), torch.stack(y)


@bug("mask-inverted")
def mask_with_an_own_token_is_inverted():
    rows = sets()
    return (
        Sets(),
        DataLoader(rows[:480], 32, shuffle=True, collate_fn=filled),
        DataLoader(rows[480:], 32, collate_fn=filled),
    )


class Reviews(Dataset):
    """Words and whether the last that matters is good; texts differ much in length."""

    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(count):
            words = torch.randint(
                11, 60, (int(torch.tensor([5, 7, 9, 50])[torch.randint(0, 4, (1,), generator=g)]),), generator=g
            )
            good = int(torch.randint(0, 2, (1,), generator=g))
            words[-2] = 1 + 5 * good + int(torch.randint(0, 5, (1,), generator=g))
            self.rows.append((words, good))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def reviewed(rows):
    x, y = zip(*rows, strict=True)
    return pad_sequence(x, batch_first=True), torch.tensor([len(t) for t in x]), torch.tensor(y)


class Reader(LossOnly):
    """Reads the last state of a recurrent layer."""

    at_end = False

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.net = (
            nn.Embedding(60, 16, padding_idx=0),
            nn.GRU(16, 32, batch_first=True),
            nn.Linear(32, 2),
        )

    def predict(self, x, lengths):
        out, _ = self.body(self.embed(x))
        return self.net(out[torch.arange(len(x)), lengths - 1] if self.at_end else out[:, -1])

    def loss(self, x, lengths, y):
        return F.cross_entropy(self.predict(x, lengths), y)


def reviews():
    train, val = Reviews(640, 0), Reviews(160, 1)
    return DataLoader(train, 32, shuffle=True, collate_fn=reviewed), DataLoader(val, 32, collate_fn=reviewed)


@bug("masked-matters")
def last_state_after_the_padding():
    return Reader(), *reviews()


def shuffled_rows(alike):
    g = np.random.default_rng(0)
    y = np.repeat(np.arange(6), 100)
    x = g.normal(size=(6, 11))[y] * 2 + g.normal(size=(600, 11))
    if alike:
        order = g.permutation(len(x))
        x, y = x[order], y[order]
    else:
        x = x[g.permutation(len(x))]
        y = y[g.permutation(len(y))]
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


class Rows(Base):
    def network(self):
        return mlp(11, 32, 6)


@bug("at-chance")
def rows_and_labels_are_shuffled_apart():
    return Rows(), *halves(*shuffled_rows(alike=False))


class Codes(LossOnly):
    """A variational autoencoder, whose error is a sum over pixels or their mean."""

    summed = False

    def __init__(self):
        super().__init__()
        self.net, self.out = mlp(64, 32, 8), mlp(4, 32, 64)

    def training_step(self, batch, batch_idx):
        x = batch[0].flatten(1)
        mean, log_variance = self.net(x).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        error = F.mse_loss(self.out(drawn), x, reduction="sum" if self.summed else "mean")
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()
        return (error / len(x) if self.summed else error) + divergence

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))


@bug("sum-and-mean")
def error_of_pixels_is_a_mean():
    return Codes(), *digits()


class Similar(LossOnly):
    """Finds the other view of a sample among all views of a batch but itself."""

    scale = 0.1

    def training_step(self, batch, batch_idx):
        x = batch[0]
        z = F.normalize(self.net(torch.cat([x + 0.1 * torch.randn_like(x) for _ in range(2)])), dim=1)
        logits = (z @ z.T * self.scale).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
        return F.cross_entropy(logits, torch.arange(len(z)).roll(len(x)))

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))


@bug("flat-logits")
def temperature_of_similarities_is_a_factor():
    return Similar(), *digits()


class Noisy(Dataset):
    """Digits and the same with noise."""

    def __init__(self, x, *, seeded):
        self.x, self.seeded = x, seeded

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(7 if self.seeded else index)
        return self.x[index] + 0.3 * torch.randn(64, generator=g), self.x[index]


class Denoised(LossOnly):
    def network(self):
        return mlp(64, 64, 64)

    def loss(self, x, y):
        return F.mse_loss(self(x), y)


def noisy(seeded):
    train, val = digits(loaded=False)
    return loaders(*(Noisy(part.tensors[0].flatten(1), seeded=seeded) for part in (train, val)))


@bug("global-seed")
def each_sample_has_the_same_noise():
    return Denoised(), *noisy(seeded=True)


class Trusted(Base):
    """Weighs samples by how far their label is trusted."""

    reduction = "mean"

    def training_step(self, batch, batch_idx):
        x, y, trust = batch
        return (F.cross_entropy(self(x), y, reduction=self.reduction) * trust).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())


def trusted():
    train, val = digits(loaded=False)
    trust = torch.rand(len(train), generator=torch.Generator().manual_seed(0))
    return loaders(TensorDataset(*train.tensors, trust), val)


@bug("weights-of-mean")
def weights_after_the_mean():
    return Trusted(), *trusted()


class Scenes(Dataset):
    """Pictures of rectangles and the class of each pixel, at half of their size."""

    def __init__(self, count, seed, mode):
        g = torch.Generator().manual_seed(seed)
        self.masks, self.mode = torch.zeros(count, 24, 24, dtype=torch.long), mode
        for mask in self.masks:
            for _ in range(4):
                a, b = torch.randint(0, 18, (2,), generator=g)
                mask[a : a + 6, b : b + 5] = int(torch.randint(1, 4, (1,), generator=g))
        self.x = self.masks[:, None] / 3 + 0.1 * torch.randn(count, 1, 24, 24, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = F.interpolate(self.x[index][None], (12, 12), mode="bilinear")[0]
        return x, F.interpolate(self.masks[index][None, None].float(), (12, 12), mode=self.mode)[0, 0].long()


class Pixels(LossOnly):
    def network(self):
        return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def loss(self, x, y):
        return F.cross_entropy(self(x), y)


@bug("mask-resized")
def masks_are_interpolated():
    return Pixels(), *loaders(Scenes(480, 0, "bilinear"), Scenes(160, 1, "bilinear"))


class Cached(Base):
    """A head on frozen features, which are computed once for each key."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU()).requires_grad_(False)
        self.net, self.known = nn.Linear(64, 10), {}

    def key(self, index, batch_idx):
        return batch_idx

    def features(self, key, x):
        if key not in self.known:
            self.known[key] = self.body(x)
        return self.known[key]

    def training_step(self, batch, batch_idx):
        index, x, y = batch
        return F.cross_entropy(self.net(self.features(self.key(index, batch_idx), x)), y)

    def validation_step(self, batch, batch_idx):
        _, x, y = batch
        self.log("val/acc", (self.net(self.body(x)).argmax(1) == y).float().mean())


def counted():
    train, val = (TensorDataset(torch.arange(len(part)), *part.tensors) for part in digits(loaded=False))
    return loaders(train, val)


@bug("cached-by-index")
def features_are_kept_by_batch():
    return Cached(), *counted()


class Survival(LossOnly):
    """Hazards of ten times."""

    def network(self):
        return mlp(5, 32, 10)

    def hazard(self, x, time, event):
        happens = F.one_hot(time, 10).float()
        at_risk = torch.arange(10) <= time[:, None]
        loss = F.binary_cross_entropy_with_logits(self.net(x), happens, reduction="none")
        return (loss * at_risk).sum(1).mean()

    def training_step(self, batch, batch_idx):
        return self.hazard(*batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.hazard(*batch))


def patients():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(640, 5, generator=g)
    dies, leaves = (torch.empty(640).exponential_(generator=g) * scale for scale in (5 * (-x[:, 0]).exp(), 4))
    return halves(x, torch.minimum(dies, leaves).clamp(max=9.9).long(), (dies < leaves).float())


@bug("unused-part")
def who_left_counts_as_dead():
    return Survival(), *patients()
