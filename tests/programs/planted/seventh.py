"""Bugs of a set whose writer did not know the checks, which no check named before: docs/diagnosis.md has the count."""

import copy

import numpy as np
import torch
from programs import (
    Base,
    Convnet,
    LossOnly,
    Manual,
    Table,
    bug,
    diabetes,
    digits,
    halves,
    loaders,
    mlp,
    segments,
    sequences,
    tokens,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset


class FlippedPictures(Dataset):
    """Pictures that are flipped and brightened at random, and their masks."""

    both = False

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x, y = self.x[i], self.y[i]
        if torch.rand(()) < 0.5:
            x, y = x.flip(-1), y.flip(-1) if self.both else y
        return x * (0.9 + 0.2 * torch.rand(())), y


class Segmentation(LossOnly):
    def network(self):
        return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))


@bug("target-not-flipped")
def mask_is_not_flipped():
    """The picture is flipped, its mask is not."""
    x, y = segments()
    return Segmentation(), *loaders(FlippedPictures(x[:240], y[:240]), TensorDataset(x[240:], y[240:]))


@bug("overlap", "group-overlap")
def rare_rows_copied_before_the_split():
    """Rows of the rare class are copied before the split, so that copies are in both parts."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(600, 24, generator=g)
    y = (x[:, 0] + x[:, 1] + torch.randn(600, generator=g) > 2.2).long()
    rare = torch.cat([y.nonzero()[:, 0]] * 6)
    x, y = torch.cat([x, x[rare]]), torch.cat([y, y[rare]])
    order = torch.randperm(len(y), generator=g)

    class M(Base):
        def network(self):
            return mlp(24, 32, 2)

    return M(), *halves(x[order], y[order], split=int(0.8 * len(y)))


@bug("degrees")
def wind_in_degrees():
    """sin and cos of a column in degrees."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(640, 10, generator=g)
    x[:, 3] = 360 * torch.rand(640, generator=g)

    class M(Table):
        def forward(self, x):
            wind = x[:, 3]
            return self.net(torch.cat([x[:, :3], torch.sin(wind)[:, None], torch.cos(wind)[:, None], x[:, 5:]], 1))

    return M(), *halves(x, x[:, 0] + torch.deg2rad(x[:, 3]).sin())


@bug("classes-renumbered")
def labels_encoded_by_split():
    """Each split numbers its own classes, and validation lacks the first one."""
    train, val = digits(loaded=False)
    x, y = (torch.stack(part) for part in zip(*val, strict=True))
    rest = TensorDataset(x[y > 0], y[y > 0] - 1)
    return Base(), *loaders(train, rest)


class Attentive(LossOnly):
    """Attention to tokens that are no padding."""

    def __init__(self):
        super().__init__()
        self.net, self.embed = nn.Linear(32, 2), nn.Embedding(13, 32)
        self.places = nn.Parameter(torch.randn(16, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def mask(self, x):
        return x == 0

    def forward(self, x):
        hidden = self.body(self.embed(x) + self.places, src_key_padding_mask=self.mask(x))
        weights = (x != 0).float()[..., None]
        return self.net((hidden * weights).sum(1) / weights.sum(1))


def padded():
    x = tokens() + 1
    y = ((x < 6).float().mean(1) > 0.5).long()
    lengths = 6 + torch.arange(len(x)) % 10
    return x * (torch.arange(16) < lengths[:, None]), y


@bug("mask-inverted")
def mask_of_the_tokens():
    """The padding mask that the module itself makes is True at tokens."""

    class M(Attentive):
        def mask(self, x):
            return x != 0

    return M(), *halves(*padded())


class Translator(LossOnly):
    """An encoder and a decoder, both recurrent."""

    def __init__(self):
        super().__init__()
        self.net, self.source, self.target = nn.Linear(32, 12), nn.Embedding(12, 32), nn.Embedding(13, 32)
        self.encoder, self.decoder = nn.GRU(32, 32, batch_first=True), nn.GRU(32, 32, batch_first=True)

    def shifted(self, y):
        return F.pad(y[:, :-1], (1, 0), value=12)

    def loss(self, x, y):
        hidden = self.encoder(self.source(x))[1]
        out = self.net(self.decoder(self.target(self.shifted(y)), hidden)[0])
        return F.cross_entropy(out.flatten(0, 1), y.flatten())


@bug("future-leak")
def decoder_beside_an_encoder_is_not_shifted():
    """The decoder gets the tokens that it is to predict."""

    class M(Translator):
        def shifted(self, y):
            return y

    x = tokens()
    return M(), *halves(x, (x.flip(1) + 1) % 12)


class Metric(Base):
    """Learns distances by the hardest triplets of a batch."""

    def network(self):
        return mlp(outputs=8)

    def hardest(self, distances, is_other):
        return distances.masked_fill(~is_other, float("inf")).min(1).values

    def loss(self, x, y):
        z = F.normalize(self(x), dim=1)
        distances = (z[:, None] - z[None]).pow(2).sum(-1)
        same = y[:, None] == y[None]
        return F.relu((distances * same).max(1).values - self.hardest(distances, ~same) + 0.3).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(*batch))


@bug("masked-extreme")
def hardest_negative_is_the_mask():
    """What the mask leaves out is 0, so it is the least of distances."""

    class M(Metric):
        def hardest(self, distances, is_other):
            return (distances * is_other.float()).min(1).values

    return M(), *digits()


class Adapter(nn.Module):
    """LoRA of a frozen layer."""

    def __init__(self, layer, std=0.0):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, 4, bias=False), nn.Linear(4, layer.out_features, bias=False)
        nn.init.normal_(self.down.weight, std=std) if std else nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


@bug("stuck-at-zero")
def both_layers_of_lora_are_zero():
    """Both layers of an adapter begin at 0."""

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), Adapter(nn.Linear(64, 32)), nn.ReLU(), nn.Linear(32, 10))

    return M(), *digits()


class Dropped(Base):
    """Classifies with a hint of the class, which is dropped for some."""

    share = 0.9

    def __init__(self):
        super().__init__()
        self.hint = nn.Embedding(11, 64)

    def loss(self, x, y):
        hint = torch.where(torch.rand(y.shape) < self.share, torch.full_like(y, 10), y)
        noise = torch.randn_like(x)
        return F.mse_loss(self.net(x.flatten(1) + noise.flatten(1) + self.hint(hint)), noise.flatten(1)[:, :10])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(*batch))


@bug("condition-dropped")
def condition_is_dropped_for_most():
    """The class is kept for one tenth, where it was to be dropped for one tenth."""
    return Dropped(), *digits(batch=64)


class Language(LossOnly):
    """A recurrent language model whose last layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.net = nn.Embedding(12, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 12)
        self.net.weight = self.embed.weight
        self.start()

    def start(self):
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)

    def loss(self, x, y):
        return F.cross_entropy(self.net(self.body(self.embed(x))[0]).flatten(0, 1), y.flatten())


@bug("untied")
def initialization_unties():
    """A new parameter is assigned to one of the layers that were tied."""

    class M(Language):
        def start(self):
            self.embed.weight = nn.Parameter(torch.empty(12, 32).uniform_(-0.1, 0.1))

    x = tokens()
    return M(), *halves(x[:, :-1], x[:, 1:])


@bug("schedule-absolute")
def schedule_returns_the_rate():
    """The function of LambdaLR returns the rate, where a factor is expected."""

    class M(Base):
        def configure_optimizers(self):
            lr = 3e-3
            optimizer = torch.optim.Adam(self.parameters(), lr)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr * min(1.0, (step + 1) / 10))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return M(), *digits()


@bug("thawed")
def thawed_without_the_optimizer():
    """The optimizer gets what requires gradients at the start; the body is thawed later."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU()).requires_grad_(False)

        def on_train_epoch_start(self):
            self.body.requires_grad_(self.current_epoch > 0)

        def forward(self, x):
            return self.net(self.body(x))

        def configure_optimizers(self):
            return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), self.lr)

    return M(), *digits()


@bug("gradients-lost")
def cleared_for_each_micro_batch():
    """zero_grad is called for each of four batches of a step."""

    class M(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(*batch) / 4)
            if batch_idx % 4 == 3:
                optimizer.step()

    return M(), *digits()


class Averaged(Base):
    """An average of the weights, which validation uses."""

    has_statistics = False

    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(self.net).requires_grad_(False).eval()

    def network(self):
        return Convnet()

    def on_train_batch_end(self, *args):
        with torch.no_grad():
            for old, new in zip(self.average.parameters(), self.net.parameters(), strict=True):
                old.lerp_(new, 0.1)
            for old, new in zip(self.average.buffers(), self.net.buffers(), strict=True) if self.has_statistics else ():
                old.copy_(new)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/acc", (self.average(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), self.lr)


@bug("average-statistics")
def average_without_statistics():
    """The running statistics of the average stay 0 and 1."""
    return Averaged(), *digits()


@bug("own-scale")
def each_split_has_its_own_scale():
    """Validation is standardized by its own mean and deviation."""
    train, val = diabetes(loaded=False)
    parts = [(part.tensors[0] - part.tensors[0].mean(0)) / part.tensors[0].std(0) for part in (train, val)]
    sets = [TensorDataset(x, part.tensors[1]) for x, part in zip(parts, (train, val), strict=True)]
    return Table(), *loaders(*sets)


@bug("constant-term")
def derivative_without_its_graph():
    """The derivative in the residual of a differential equation has no gradient."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2))

        def loss(self, t):
            t = t.clone().requires_grad_(True)
            with torch.enable_grad():
                u, v = self(t).unbind(-1)
                (du,) = torch.autograd.grad(u.sum(), t, retain_graph=True)
                start = self(torch.zeros(1, 1))
                return (du[:, 0] - v).pow(2).mean() + 10 * (start - torch.tensor([1.0, 0.0])).pow(2).sum()

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    return M(), *halves(2 * torch.rand(640, 1, generator=torch.Generator().manual_seed(0)))


@bug("constant-term")
def penalty_of_data():
    """A penalty of p.data changes the loss, and no weight."""

    class M(Base):
        def loss(self, x, y):
            return F.cross_entropy(self(x), y) + 1e-3 * sum(p.data.abs().sum() for p in self.parameters())

    return M(), *digits()


@bug("unused-part")
def loss_of_all_nodes():
    """The mask of the nodes for training is never read."""
    x, y = next(iter(digits(400, batch=400)[0]))
    near = torch.cdist(x.flatten(1), x.flatten(1)).topk(6, largest=False).indices
    graph = {"x": x.flatten(1), "near": near, "y": y, "train_mask": torch.arange(400) < 300}

    class M(Base):
        def loss(self, batch):
            return F.cross_entropy(self.net(batch["x"][batch["near"]].mean(1)), batch["y"])

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            rows = ~batch["train_mask"]
            out = self.net(batch["x"][batch["near"]].mean(1))[rows]
            self.log("val/acc", (out.argmax(1) == batch["y"][rows]).float().mean(), batch_size=1)

    class One(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return graph

    return M(), *(torch.utils.data.DataLoader(One(), batch_size=None) for _ in range(2))


class Clicks(LossOnly):
    """Users, and what they click."""

    def __init__(self):
        super().__init__()
        self.net, self.items = nn.Linear(8, 1), nn.Embedding(10_000, 8)

    def loss(self, item, y):
        return F.binary_cross_entropy_with_logits(self.net(self.items(item))[:, 0], y)


def clicks(kind):
    rng = np.random.default_rng(0)
    items = rng.integers(0, 9000, 2000)
    return torch.tensor(items.astype(kind)).long(), torch.tensor(rng.random(2000) < 0.5).float()


@bug("rounded-integers")
def numbers_of_items_in_half_precision():
    """Numbers of items above 2048 were rounded in float16."""
    return Clicks(), *halves(*clicks("float16"), split=1600)


class Attention(LossOnly):
    """Attention by hand to a series."""

    dim = -1

    def __init__(self):
        super().__init__()
        self.net, self.q, self.k, self.v = nn.Linear(16, 4), nn.Linear(5, 16), nn.Linear(5, 16), nn.Linear(5, 16)

    def loss(self, x, y):
        weights = (self.q(x) @ self.k(x).mT / 4).softmax(self.dim)
        return F.cross_entropy(self.net((weights @ self.v(x)).mean(1)), y)


@bug("weights-of-queries")
def softmax_over_the_queries():
    """The softmax of the scores is over the queries."""

    class M(Attention):
        dim = 1

    return M(), *halves(*sequences())


class Survival(Table):
    """Cox's partial likelihood."""

    is_descending = True

    def loss(self, x, time, event):
        order = torch.argsort(time, descending=self.is_descending)
        hazard, event = self(x)[:, 0][order], event[order]
        return -((hazard - torch.logcumsumexp(hazard, 0)) * event).sum() / event.sum()


def patients():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(640, 10, generator=g)
    time = -torch.rand(640, generator=g).log() / (x[:, 0] - 0.5 * x[:, 1]).exp()
    return x, time, (torch.rand(640, generator=g) < 0.7).float()


@bug("risk-sets")
def risk_sets_of_the_past():
    """Times are sorted in ascending order, so the risk sets hold who has left."""

    class M(Survival):
        is_descending = False

    return M(), *halves(*patients())
