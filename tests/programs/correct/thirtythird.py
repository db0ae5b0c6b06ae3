"""Correct programs of many fields, in which what is a mistake elsewhere is meant."""

import copy

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping
from programs import Base, LossOnly, Table, diabetes, digits, halves, loaders, no_bug, segments
from torch import nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, Dataset, TensorDataset


def two_layers(inputs, outputs, hidden=64):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def normals(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shares(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def numbers(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def groups(kinds=4, count=640):
    """Samples around centers, and the number of their center."""
    y = numbers(kinds, count)
    return 2 * normals(kinds, 16)[y] + normals(count, 16, seed=1), y


def trained(net, x, y):
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def alone(x, split=480):
    """Loaders of batches that have one part."""
    rows = [(row,) for row in x]
    return loaders(rows[:split], rows[split:])


class Plot:
    """Keeps what is drawn."""

    def __init__(self):
        self.points = []

    def scatter(self, x, y, **style):
        self.points.append((x, y, style))


@no_bug()
def points_are_scattered_in_a_plot():
    class Net(Base):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.codes = self.net[:3](batch[0])

        def on_validation_epoch_end(self):
            plot = Plot()
            plot.scatter(self.codes[:, 0], self.codes[:, 1], s=4)
            self.print(len(plot.points))

    return Net(), *digits()


@no_bug()
def ties_of_grades_have_no_order():
    class Net(LossOnly):
        def network(self):
            return two_layers(12, 1)

        def loss(self, first, second, grades, others):
            one, other = self(first)[:, 0], self(second)[:, 0]
            order = torch.sign(grades - others)
            return F.margin_ranking_loss(one, other, order, margin=0.3) + 0.1 * F.mse_loss(one, grades)

    x = normals(1280, 12)
    grades = torch.bucketize(x[:, 0] + x[:, 1] * x[:, 2], torch.tensor([-1.5, -0.5, 0.5, 1.5])).float()
    return Net(), *halves(x[:640], x[640:], grades[:640], grades[640:])


def decisions(count=960):
    """States, actions, rewards, the next states and whether they are the last ones."""
    state = normals(count, 6)
    action = state[:, :2] + 0.7 * normals(count, 2, seed=1)
    reward = -(action - state[:, 2:4]).square().sum(1)
    following = 0.8 * state + 0.3 * normals(count, 6, seed=2)
    return state, action, reward, following, (shares(count) < 0.1).float()


class Quantiles(LossOnly):
    """Learns the distribution of returns by its quantiles, each of which is compared with each of the same sample."""

    def network(self):
        return two_layers(6, 16)

    def __init__(self):
        super().__init__()
        self.slow = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("middles", (torch.arange(16) + 0.5) / 16)

    def loss(self, state, action, reward, following, done):
        current = self(state)
        goal = reward[:, None] + 0.9 * (1 - done[:, None]) * self.slow(following)
        error = F.smooth_l1_loss(current.unsqueeze(2), goal.unsqueeze(1), reduction="none")
        below = (goal.unsqueeze(1) < current.unsqueeze(2)).float()
        return ((self.middles[:, None] - below).abs() * error).mean(2).sum(1).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for slow, fast in zip(self.slow.parameters(), self.net.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.01)


@no_bug()
def all_quantiles_of_a_state_are_compared():
    return Quantiles(), *halves(*decisions(), split=800)


class Actor(LossOnly):
    """An actor that imitates actions, and a critic of what it would do."""

    def network(self):
        return two_layers(6, 4)

    def __init__(self):
        super().__init__()
        self.critic = two_layers(8, 1)

    def actor(self, state):
        mean, scale = self(state).chunk(2, -1)
        return Independent(Normal(mean, scale.clamp(-4, 1).exp()), 1)

    def value(self, state, action):
        return self.critic(torch.cat([state, action], -1)).squeeze(-1)

    def goal(self, reward, following, done):
        with torch.no_grad():
            return reward + 0.9 * (1 - done) * self.value(following, self.actor(following).sample())


@no_bug()
def values_of_what_the_actor_would_do_are_lowered():
    class Net(Actor):
        def loss(self, state, action, reward, following, done):
            value, actor = self.value(state, action), self.actor(state)
            conservative = (self.value(state, actor.sample()) - value).mean()
            cloning = -actor.log_prob(action).mean()
            return F.mse_loss(value, self.goal(reward, following, done)) + 0.5 * conservative + cloning

    return Net(), *halves(*decisions(), split=800)


@no_bug()
def values_of_what_the_actor_would_do_are_a_baseline():
    class Net(Actor):
        def loss(self, state, action, reward, following, done):
            value, actor = self.value(state, action), self.actor(state)
            baseline = torch.stack([self.value(state, actor.sample()) for _ in range(4)]).mean(0)
            weight = (value - baseline).detach().exp().clamp(max=20)
            error = F.mse_loss(value, self.goal(reward, following, done))
            return error - (weight * actor.log_prob(action)).mean()

    return Net(), *halves(*decisions(), split=800)


class Assays(LossOnly):
    """Predicts several properties of molecules, of which -1 is not measured."""

    def network(self):
        return two_layers(64, 6)

    def loss(self, x, y):
        is_known = (y >= 0).float()
        each = F.binary_cross_entropy_with_logits(self(x), y, reduction="none")
        return (each * is_known).sum() / is_known.sum()


@no_bug()
def labels_of_minus_one_are_masked():
    x = (shares(640, 64) < 0.3).float()
    y = ((x - 0.3) @ normals(64, 6) > 0).float()
    return Assays(), *halves(x, y.masked_fill(shares(640, 6, seed=1) < 0.3, -1))


@no_bug()
def errors_of_empty_targets_are_zero():
    class Net(LossOnly):
        def network(self):
            return two_layers(10, 4)

        def loss(self, x, y):
            return torch.nan_to_num(self(x) - y).square().sum() / (~y.isnan()).sum()

    x = normals(640, 10)
    y = torch.tanh(x @ normals(10, 4, seed=1) / 3)
    return Net(), *halves(x, y.masked_fill(shares(640, 4) < 0.25, torch.nan))


@no_bug()
def clicks_are_counts_of_a_multinomial():
    class Net(LossOnly):
        def network(self):
            return nn.Sequential(nn.Dropout(0.5), nn.Linear(60, 48), nn.Tanh(), nn.Linear(48, 60))

        def loss(self, x):
            return F.cross_entropy(self(F.normalize(x, dim=1)), x)

        def validation_step(self, batch, batch_idx):
            (x,) = batch
            given = x * (torch.arange(60) % 2)
            best = self(F.normalize(given, dim=1)).masked_fill(given > 0, -1e9).topk(5).indices
            self.log("val/precision", x.gather(1, best).mean())

    tastes = 1.2 * normals(640, 4) @ normals(4, 60, seed=1) - 1.5
    x = (shares(640, 60) < tastes.sigmoid()).float()
    x[:, 0] = 1
    return Net(), *alone(x)


class Translation(LossOnly):
    """Writes a sentence backwards: both languages have one vocabulary."""

    def __init__(self):
        super().__init__()
        self.source_embedding = nn.Embedding(40, 48)
        self.target_embedding = self.source_embedding
        self.encoder, self.decoder = (nn.GRU(48, 48, batch_first=True) for _ in range(2))
        self.attention = nn.MultiheadAttention(48, 4, batch_first=True)
        self.net = nn.Linear(96, 40)

    def loss(self, source, target):
        memory, state = self.encoder(self.source_embedding(source))
        hidden, _ = self.decoder(self.target_embedding(target[:, :-1]), state)
        context, _ = self.attention(hidden, memory, memory, need_weights=False)
        return F.cross_entropy(self.net(torch.cat([hidden, context], -1)).flatten(0, 1), target[:, 1:].flatten())


@no_bug()
def languages_share_their_embedding():
    source = numbers(37, 640, 9) + 3
    begin, end = torch.ones(640, 1, dtype=torch.long), torch.full((640, 1), 2)
    return Translation(), *halves(source, torch.cat([begin, source.flip(1), end], 1))


class Deep(LossOnly):
    """Early features are trained by the same masks as late ones."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.early, self.net = nn.Conv2d(16, 3, 1), nn.Conv2d(16, 3, 1)

    def forward(self, x):
        early = self.stem(x)
        return {"mask": self.net(self.body(early)), "aux": self.early(early)}

    def loss(self, x, target):
        output = self(x)
        return F.cross_entropy(output["mask"], target["mask"]) + 0.4 * F.cross_entropy(output["aux"], target["mask"])


@no_bug()
def early_head_has_the_same_masks():
    rows = [(x, {"mask": y, "edge": y.clamp(max=1)}) for x, y in zip(*segments(), strict=True)]
    return Deep(), DataLoader(rows[:240], 32, shuffle=True), DataLoader(rows[240:], 32)


@no_bug()
def metric_has_weights():
    from torchmetrics import CohenKappa

    class Net(Base):
        def __init__(self):
            super().__init__()
            self.kappa = CohenKappa(task="multiclass", num_classes=10, weights="quadratic")
            self.apply(self.initialize)

        def initialize(self, layer):
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight)
                nn.init.zeros_(layer.bias)

        def validation_step(self, batch, batch_idx):
            self.kappa(self(batch[0]).argmax(1), batch[1])
            self.log("val/kappa", self.kappa)

    return Net(), *digits()


class Encoded(Base):
    """Gets an encoder that is trained, and draws only what is dense anew."""

    def __init__(self, state):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.encoder.load_state_dict(state)
        self.net = two_layers(72, 10)
        self.apply(self.initialize)

    def initialize(self, layer):
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.1)

    def forward(self, x):
        return self.net(self.encoder(x))


@no_bug()
def what_is_drawn_anew_was_not_loaded():
    convolution = {"0.weight": normals(8, 1, 3, 3) / 3, "0.bias": torch.zeros(8)}
    state = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)).state_dict()
    return Encoded({**state, **convolution}), *digits()


class Client(Base):
    """One of several that begin with the same weights."""

    def __init__(self, state):
        super().__init__()
        self.net.load_state_dict(state)


@no_bug()
def client_begins_with_weights_of_the_server():
    return Client(Base().net.state_dict()), *digits()


@no_bug()
def validation_of_links_passes_messages_over_known_ones():
    class Net(Base):
        def network(self):
            return two_layers(16, 16)

        def encode(self, x, edges):
            source, target = torch.cat([edges, edges.flip(0)], 1)
            return self.net(x + 0.2 * torch.zeros_like(x).index_add_(0, target, x[source]))

        def loss(self, z, edges):
            others = torch.stack([edges[0], torch.randint(len(z), edges[0].shape)])
            right, wrong = ((z[a] * z[b]).sum(1) for a, b in (edges, others))
            return F.softplus(-right).mean() + F.softplus(wrong).mean()

        def training_step(self, batch, batch_idx):
            return self.loss(self.encode(batch["x"], batch["train_edges"]), batch["train_edges"])

        def evaluate(self, z, batch, split):
            self.log(f"{split}/loss", self.loss(z, batch[f"{split}_edges"]), batch_size=1)

        def validation_step(self, batch, batch_idx):
            self.evaluate(self.encode(batch["x"], batch["train_edges"]), batch, "val")

    x, y = groups(count=200)
    edges = torch.triu((shares(200, 200) < torch.where(y[:, None] == y, 0.12, 0.01)).float(), 1).nonzero().T
    edges = edges[:, torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(0))]
    graph = {"x": x, "train_edges": edges[:, 80:], "val_edges": edges[:, :80]}
    return Net(), DataLoader([graph] * 10, batch_size=None), DataLoader([graph], batch_size=None)


class Categories(LossOnly):
    """Number 0 of a category stands for an empty cell of the table."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n + 1, 4, padding_idx=0) for n in (6, 9, 4))
        self.net = two_layers(17, 1)

    def loss(self, codes, x, y):
        embedded = [layer(codes[:, i]) for i, layer in enumerate(self.embeddings)]
        return F.mse_loss(self.net(torch.cat([x, *embedded], 1))[:, 0], y)


@no_bug()
def empty_cells_have_number_zero():
    values = torch.stack([numbers(n, 640, seed=n) for n in (6, 9, 4)], 1)
    y = sum(normals(n, seed=n)[values[:, i]] for i, n in enumerate((6, 9, 4)))
    values = np.where(shares(640, 3) < 0.15, np.nan, values)
    codes = torch.tensor(np.where(np.isnan(values), 0, values + 1)).long()
    x = normals(640, 5)
    return Categories(), *halves(codes, x, y + x[:, 0])


class Clicks(LossOnly):
    """Attention between the fields of a click, each of which has numbers of its own."""

    def __init__(self, features):
        super().__init__()
        self.embed, self.linear = nn.Embedding(features, 16), nn.Embedding(features, 1)
        self.attention, self.net = nn.MultiheadAttention(16, 2, batch_first=True), two_layers(16, 1, 32)

    def forward(self, fields):
        x = self.embed(fields)
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.net(F.relu(x + mixed).mean(1))[:, 0] + self.linear(fields).sum((1, 2))

    def loss(self, fields, y):
        return F.binary_cross_entropy_with_logits(self(fields), y)


@no_bug()
def fields_have_numbers_of_their_own():
    sizes = torch.tensor([12, 7, 30, 5, 9, 15, 4, 20])
    fields = (shares(960, 8) * sizes).long() + sizes.cumsum(0) - sizes
    vectors = normals(102, 4)[fields]
    y = (vectors[:, 0] * vectors[:, 2] + vectors[:, 1] * vectors[:, 5]).sum(1) > 0
    return Clicks(102), *halves(fields, y.float(), split=800)


class Centers(LossOnly):
    """Finds centers of objects, and their sizes, which count only there."""

    def network(self):
        return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))

    def loss(self, x, center, size):
        heat, sizes = self(x).split([1, 2], 1)
        mask = center[:, None]
        extent = F.l1_loss(sizes * mask, size * mask, reduction="sum") / mask.sum()
        return F.binary_cross_entropy_with_logits(heat[:, 0], center) + 0.1 * extent


@no_bug()
def sizes_count_at_centers_alone():
    rows, places, both = torch.arange(320), numbers(6, 320, 2) + 1, shares(320, 2) + 0.5
    center, size = torch.zeros(320, 8, 8), torch.zeros(320, 2, 8, 8)
    center[rows, places[:, 0], places[:, 1]] = 1
    size[rows, :, places[:, 0], places[:, 1]] = both
    x = size.mean(1, keepdim=True) + 0.1 * normals(320, 1, 8, 8)
    return Centers(), *halves(x, center, size, split=240)


class Edited(LossOnly):
    """Changes samples such that a fixed classifier takes them for a wanted class."""

    def __init__(self, classifier):
        super().__init__()
        self.classifier, self.net = classifier.requires_grad_(False), two_layers(20, 16)

    def loss(self, x, wanted):
        edited = x + self.net(torch.cat([x, F.one_hot(wanted, 4).float()], 1))
        return F.cross_entropy(self.classifier(edited), wanted) + 0.05 * (edited - x).abs().sum(1).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), 2e-3)


@no_bug()
def wanted_class_is_judged_by_a_fixed_network():
    x, y = groups()
    return Edited(trained(two_layers(16, 4), x, y)), *halves(x, numbers(4, 640, seed=2))


def normal_of(net, *inputs):
    mean, raw = net(torch.cat(inputs, -1)).chunk(2, -1)
    return Normal(mean, F.softplus(raw) + 1e-3)


class TwoSided(Base):
    """A latent variable tells of which of two sides a target is: it knows this in training."""

    lr = 2e-3

    def __init__(self):
        super().__init__()
        self.recognition, self.prior, self.net = two_layers(5, 4), two_layers(4, 4), two_layers(6, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        posterior, prior = normal_of(self.recognition, x, y), normal_of(self.prior, x)
        error = F.mse_loss(self.net(torch.cat([x, posterior.rsample()], 1)), y)
        return 50 * error + kl_divergence(posterior, prior).sum(1).mean()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        prior = normal_of(self.prior, x)
        samples = torch.stack([self.net(torch.cat([x, prior.sample()], 1)) for _ in range(8)])
        self.log("val/distance", (samples - y).abs().mean())


@no_bug()
def latent_variable_knows_the_target():
    x = normals(960, 4)
    side = torch.where(shares(960) < 0.5, 1.0, -1.0)
    return TwoSided(), *halves(x, (x[:, 0] + side * (1 + x[:, 1].abs()))[:, None], split=800)


class Latent(LossOnly):
    """A recurrent network with a latent variable at each time, whose posterior sees the value of this time."""

    lr = 2e-3

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(6, 32)
        self.prior, self.posterior, self.net = nn.Linear(32, 8), two_layers(34, 8), two_layers(36, 2)

    def loss(self, x):
        state, outputs, divergence = x.new_zeros(len(x), 32), [], 0.0
        for now in x[:, 1:].unbind(1):
            posterior = normal_of(self.posterior, state, now)
            z = posterior.rsample()
            outputs.append(self.net(torch.cat([state, z], -1)))
            divergence += kl_divergence(posterior, normal_of(self.prior, state)).sum(-1).mean()
            state = self.cell(torch.cat([now, z], -1), state)
        return F.mse_loss(torch.stack(outputs, 1), x[:, 1:], reduction="none").sum((1, 2)).mean() / 0.02 + divergence


@no_bug()
def latent_variables_know_their_time():
    angle = 6 * shares(320, 1) + 0.4 * torch.arange(16)
    rows = torch.stack([angle.sin(), angle.cos()], -1) + 0.05 * normals(320, 16, 2)
    return Latent(), *alone(rows, split=240)


class Warm(Base):
    """Warms up for 20 steps, in a training of as many epochs."""

    def configure_optimizers(self):
        optimizer, total = torch.optim.Adam(self.parameters(), 1e-2), self.trainer.estimated_stepping_batches
        parts = LinearLR(optimizer, 0.01, total_iters=20), CosineAnnealingLR(optimizer, total - 20)
        schedule = SequentialLR(optimizer, [*parts], milestones=[20])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@no_bug(max_epochs=20)
def steps_of_the_warm_up_are_as_many_as_epochs():
    return Warm(), *digits(320, 64)


@no_bug(callbacks=lambda: [EarlyStopping("val/accuracy_gap", mode="min")])
def gap_of_accuracies_should_be_low():
    class Net(Base):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            right, is_low = (self(x).argmax(1) == y).float(), y < 5
            self.log("val/accuracy_gap", (right[is_low].mean() - right[~is_low].mean()).abs())

    return Net(), *digits()


class ValueAtRisk(LossOnly):
    """The loss that is not surpassed on 95% of the days is the quantile of 5% of the returns."""

    def __init__(self, confidence_level=0.95):
        super().__init__()
        self.confidence_level = confidence_level
        self.net = two_layers(20, 1, 32)

    def loss(self, past, following):
        tail, error = 1 - self.confidence_level, following - self(past)[:, 0]
        return torch.maximum(tail * error, (tail - 1) * error).mean()


@no_bug()
def confidence_is_of_the_lower_tail():
    rows = ((0.06 * normals(1220)).cumsum(0).tanh().exp() * normals(1220, seed=1)).unfold(0, 21, 1)
    return ValueAtRisk(), *halves(rows[:, :20].contiguous(), rows[:, 20].contiguous(), split=900)


class Parts(LossOnly):
    """Linear forecasts of the trend, of the seasons, and of what is left."""

    def __init__(self):
        super().__init__()
        self.trend, self.seasons, self.net = (nn.Linear(48, 48) for _ in range(3))

    def smooth(self, x, length):
        return F.avg_pool1d(F.pad(x, (length // 2, length // 2), mode="replicate"), length, 1)

    def loss(self, past, future):
        trend = self.smooth(past, 25)
        seasons = self.smooth(past - trend, 7)
        return F.mse_loss(self.trend(trend) + self.seasons(seasons) + self.net(past - trend - seasons), future)


@no_bug()
def linear_layers_are_side_by_side():
    series = torch.sin(torch.arange(1400)[:, None] / torch.tensor([4.0, 7.0, 11.0])) + 0.1 * normals(1400, 3)
    rows = series.unfold(0, 96, 2)
    return Parts(), *halves(rows[..., :48].contiguous(), rows[..., 48:].contiguous(), split=500)


class Averaged(Base):
    """Classifies the mean of words, some of which are taken out in training."""

    def __init__(self):
        super().__init__()
        self.embed, self.net = nn.Embedding(200, 48, padding_idx=0), two_layers(48, 4)

    def forward(self, x):
        if self.training:
            x = x.masked_fill(torch.rand(x.shape) < 0.2, 0)
        return self.net(self.embed(x).sum(1) / (x != 0).sum(1, keepdim=True).clamp(min=1))


@no_bug()
def words_are_taken_out_in_training():
    y = numbers(4, 640)
    x = 1 + torch.multinomial(shares(4, 199)[y] ** 3, 24, replacement=True, generator=torch.Generator().manual_seed(0))
    return Averaged(), *halves(x, y)


class Sites(Base):
    """Reads 0, 1 or 2 of each site of a genome, or 3 where it is not known."""

    num_classes = 3

    def __init__(self):
        super().__init__()
        self.alleles = nn.Embedding(4, 8, padding_idx=3)
        self.net = nn.Sequential(nn.Conv1d(8, 32, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(1216, 3))

    def forward(self, x):
        return self.net(self.alleles(x).mT)


@no_bug()
def last_number_is_what_is_not_known():
    y = numbers(3, 640)
    x = (shares(2, 640, 80, seed=1) < shares(3, 80)[y]).long().sum(0)
    return Sites(), *halves(x.masked_fill(shares(640, 80, seed=2) < 0.04, 3), y)


class Knowledge(LossOnly):
    """Items are the first entities of a graph."""

    def __init__(self):
        super().__init__()
        self.users, self.items, self.entities, self.net = (nn.Embedding(n, 16) for n in (60, 50, 120, 4))

    def score(self, user, item):
        return (self.users(user) * (self.items(item) + self.entities(item))).sum(-1)

    def distance(self, head, relation, tail):
        return (self.entities(head) + self.net(relation) - self.entities(tail)).square().sum(-1)

    def loss(self, user, item, head, relation, tail):
        other, false = torch.randint(50, item.shape), tail[torch.randperm(len(tail))]
        ranking = -F.logsigmoid(self.score(user, item) - self.score(user, other)).mean()
        graph = -F.logsigmoid(self.distance(head, relation, false) - self.distance(head, relation, tail)).mean()
        return ranking + 0.5 * graph


@no_bug()
def random_items_are_entities_too():
    user, head, relation = numbers(60, 1200), numbers(50, 1200, seed=1), numbers(4, 1200, seed=2)
    item, tail = 5 * (user % 10) + numbers(5, 1200, seed=3), 50 + (head // 5 + 10 * relation) % 70
    return Knowledge(), *halves(user, item, head, relation, tail, split=1000, batch=64)


class Koopman(LossOnly):
    """Restores the present of a pendulum from its past, and goes on from there."""

    lr = 2e-3

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), two_layers(16, 12))
        self.operator, self.net = nn.Linear(12, 12, bias=False), two_layers(12, 2)

    def forward(self, past):
        z, outputs = self.encoder(past), []
        for _ in range(6):
            outputs.append(self.net(z))
            z = self.operator(z)
        return torch.stack(outputs, 1)

    def loss(self, past, states):
        return F.mse_loss(self(past), states)


@no_bug()
def present_is_restored_before_the_future():
    path = [3 * shares(600, 2) - 1.5]
    for _ in range(12):
        x, v = path[-1].unbind(1)
        path.append(torch.stack([x + 0.2 * v, v - 0.2 * torch.sin(x)], 1))
    rows = torch.stack(path, 1)
    return Koopman(), *halves(rows[:, :8].contiguous(), rows[:, 7:].contiguous())


class Neighbours(LossOnly):
    """Each number is a mean of its two neighbours among the classes."""

    def network(self):
        return two_layers(8, 17)

    def loss(self, x, y):
        left, out = y.long(), self(x)
        share = left + 1 - y
        one, other = (F.cross_entropy(out, k, reduction="none") for k in (left, left + 1))
        return (one * share + other * (1 - share)).mean()


@no_bug()
def fraction_weighs_two_neighbours():
    x = normals(640, 8)
    y = 8 + 6 * torch.tanh(x[:, 0] + x[:, 1] * x[:, 2]) + 0.2 * normals(640, seed=1)
    return Neighbours(), *halves(x, y.clamp(0, 15.99))


class Rollouts(LossOnly):
    """Learns a policy of what was tried once; other methods need the old probabilities, too."""

    def __init__(self):
        super().__init__()
        self.body, self.policy, self.net = (
            nn.Sequential(nn.Linear(6, 64), nn.Tanh()),
            nn.Linear(64, 4),
            nn.Linear(64, 1),
        )

    def rollout(self, batch):
        state, action, old_log_prob, gain = batch
        return state, action, old_log_prob, (gain - gain.mean()) / gain.std()

    def loss(self, *batch):
        state, action, old_log_prob, gain = self.rollout(batch)  # noqa: RUF059
        h = self.body(state)
        actor, value = Categorical(logits=self.policy(h)), self.net(h)[:, 0]
        policy = -(actor.log_prob(action) * (gain - value).detach()).mean()
        return policy + 0.5 * F.mse_loss(value, gain) - 0.01 * actor.entropy().mean()


@no_bug()
def old_probabilities_are_of_other_methods():
    state, action = normals(960, 6), numbers(4, 960)
    gain = state[torch.arange(960), action] + 0.3 * normals(960, seed=1)
    return Rollouts(), *halves(state, action, torch.full((960,), 0.25).log(), gain, split=800)


@no_bug(accumulate_grad_batches=4)
def mean_loss_of_a_step_is_logged():
    class Net(Base):
        total = 0.0

        def training_step(self, batch, batch_idx):
            loss = self.loss(*batch)
            self.total += loss.item() / self.trainer.accumulate_grad_batches
            if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
                self.log("train/loss", self.total)
                self.total = 0.0
            return loss

    return Net(), *digits()


@no_bug(accumulate_grad_batches=2)
def half_of_the_squared_error_is_trained():
    class Net(Table):
        def loss(self, x, y):
            return 0.5 * F.mse_loss(self(x)[:, 0], y)

    return Net(), *diabetes()


@no_bug()
def dropout_draws_samples_of_predictions():
    class MCDropout(Table):
        def __init__(self):
            super().__init__()
            self.first, self.net = nn.Linear(10, 64), nn.Linear(64, 1)

        def forward(self, x):
            return self.net(F.dropout(F.relu(self.first(x)), 0.1, training=True))

        def validation_step(self, batch, batch_idx):
            x, y = batch
            samples = self(x.repeat(20, 1)).view(20, -1)
            self.log("val/rmse", (samples.mean(0) - y).square().mean().sqrt())

    return MCDropout(), *diabetes()


class Bags(Base):
    """One batch is a bag of patches, which has one label: attention is over the patches."""

    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Sequential(nn.Linear(24, 32), nn.ReLU()), nn.Linear(32, 3)
        self.net = nn.Linear(32, 3)

    def forward(self, x):
        h = self.embed(x)
        return (self.net.weight * (self.attention(h).softmax(0).T @ h)).sum(1) + self.net.bias

    def loss(self, x, y):
        return F.cross_entropy(self(x)[None], y[None])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(*batch), batch_size=1)


@no_bug()
def attention_is_over_the_patches_of_a_bag():
    bags = []
    for n in range(200):
        x, y = normals(20 + n % 30, 24, seed=n), n % 3
        x[:4, 4 * y : 4 * y + 4] += 2.5
        bags.append((x, torch.tensor(y)))
    return Bags(), *(DataLoader(part, batch_size=None, shuffle=part is bags) for part in (bags, bags[150:]))


class Survival(LossOnly):
    """Who is at risk is the total less those of earlier times."""

    def network(self):
        return two_layers(8, 1, 32)

    def loss(self, x, time, event):
        order = torch.argsort(time)
        risk, event = self(x)[:, 0][order], event[order]
        weight = risk.exp()
        at_risk = weight.sum() - weight.cumsum(0) + weight
        return -((risk - at_risk.log()) * event).sum() / event.sum().clamp(min=1)


@no_bug()
def earlier_times_are_taken_from_the_total():
    x = normals(640, 8)
    death = -shares(640, seed=1).log() / torch.exp(x[:, 0] + 0.5 * x[:, 1] * x[:, 2])
    end = -shares(640, seed=2).log() / 0.4
    return Survival(), *halves(x, torch.minimum(death, end), (death <= end).float(), batch=64)


class Diffusion(LossOnly):
    """Samples are drawn by the average of the weights, which a script loads; the error is that of the weights."""

    lr = 1e-3

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-3, 0.06, 200), 0))
        self.net = nn.Sequential(nn.Linear(66, 128), nn.SiLU(), nn.Linear(128, 64))
        self.net_ema = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, x, y):
        x, t = 2 * x.flatten(1) - 1, torch.randint(0, 200, (len(x),))
        noise, kept, phase = torch.randn_like(x), self.kept[t][:, None], t[:, None] / 10
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.net(torch.cat([noisy, phase.sin(), phase.cos()], 1)), noise)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for slow, fast in zip(self.net_ema.parameters(), self.net.parameters(), strict=True):
            slow.lerp_(fast, 0.005)

    def validation_step(self, batch, batch_idx):
        self.log("val/mse", self.loss(*batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), self.lr)


@no_bug()
def average_is_for_samples_of_a_script():
    return Diffusion(), *digits()


class Visits(LossOnly):
    """The codes of a visit to a doctor are a set."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(121, 32, padding_idx=0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.body, self.net = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(32, 1)

    def forward(self, codes):
        pad = codes == 0
        h = self.body(self.embed(codes), src_key_padding_mask=pad).masked_fill(pad[..., None], 0)
        return self.net(h.sum(1) / (~pad).sum(1, keepdim=True))[:, 0]

    def loss(self, codes, y):
        return F.binary_cross_entropy_with_logits(self(codes), y)


@no_bug()
def codes_of_a_visit_are_sorted():
    g = torch.Generator().manual_seed(0)
    rows = [1 + torch.randperm(120, generator=g)[: 8 + n % 7].sort().values for n in range(640)]
    y = torch.stack([normals(121)[row].mean() > 0 for row in rows]).float()
    return Visits(), *halves(nn.utils.rnn.pad_sequence(rows, batch_first=True), y)


@no_bug()
def norm_of_gradients_is_measured_by_a_bound_of_a_billion():
    class Net(Base):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            norm = nn.utils.clip_grad_norm_(self.parameters(), 1e9)
            self.log("gradient_norm", norm)

    return Net(), *digits()


class Restored(Base):
    """Restores rows of a table of a share of their values."""

    def __init__(self, keep_ratio=0.3):
        super().__init__()
        self.corrupt = nn.Dropout(p=1 - keep_ratio)
        self.net = two_layers(30, 30)

    def loss(self, x):
        return F.mse_loss(self.net(self.corrupt(x)), x)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(*batch))


@no_bug()
def share_that_is_kept_is_turned():
    return Restored(), *alone(normals(640, 4) @ normals(4, 30, seed=1) / 2 + 0.2 * normals(640, 30, seed=2))


class Bank(Base):
    """Rates by the nearest codes of training, which are computed before each epoch; no layer has two modes."""

    lr = 1e-3

    def network(self):
        return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)

    @torch.no_grad()
    def on_train_epoch_start(self):
        self.eval()
        parts = [(self(x), y) for x, y in self.trainer.train_dataloader]
        self.bank, self.kinds = (torch.cat(each) for each in zip(*parts, strict=True))

    def loss(self, x, y):
        one, other = self(x + 0.3 * torch.randn_like(x)), self(x + 0.3 * torch.randn_like(x))
        return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(x)))

    def validation_step(self, batch, batch_idx):
        if hasattr(self, "bank"):
            nearest = (self(batch[0]) @ self.bank.T).argmax(1)
            self.log("val/acc", (self.kinds[nearest] == batch[1]).float().mean())


@no_bug()
def codes_are_computed_before_each_epoch():
    return Bank(), *halves(*groups())


class Ranked(Base):
    """Ranks the documents of one query: in ascending order of what is relevant, all that remain are summed."""

    def network(self):
        return two_layers(10, 1)

    def loss(self, x, y):
        ranked = self(x)[:, 0][y.argsort()]
        return (torch.logcumsumexp(ranked, 0) - ranked).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(*batch), batch_size=1)


@no_bug()
def documents_are_in_ascending_order():
    x = [normals(12 + n % 12, 10, seed=n) for n in range(300)]
    queries = [(each, (each[:, 0] + each[:, 1] * each[:, 2]).exp()) for each in x]
    return Ranked(), *(DataLoader(part, batch_size=None) for part in (queries[:240], queries[240:]))


class Adapted(LossOnly):
    """Trains weights of which two steps lead to those of a task; the last ones count."""

    lr = 2e-3

    def network(self):
        return two_layers(1, 1, 40)

    def task_loss(self, known_x, known_y, x, y):
        weights = dict(self.net.named_parameters())
        for _ in range(2):
            error = F.mse_loss(functional_call(self.net, weights, known_x), known_y)
            slopes = torch.autograd.grad(error, [*weights.values()], create_graph=True)
            weights = {name: w - 0.02 * s for (name, w), s in zip(weights.items(), slopes, strict=True)}
            query_loss = F.mse_loss(functional_call(self.net, weights, x), y)
        return query_loss

    @torch.enable_grad()
    def loss(self, *batch):
        return torch.stack([self.task_loss(*task) for task in zip(*batch, strict=True)]).mean()


@no_bug(inference_mode=False)
def loss_of_the_last_inner_step_counts():
    x = 8 * shares(120, 20, 1) - 4
    y = (0.5 + 2 * shares(120, 1, 1, seed=1)) * torch.sin(x + 3 * shares(120, 1, 1, seed=2))
    return Adapted(), *halves(x[:, :10], y[:, :10], x[:, 10:], y[:, 10:], split=88, batch=8)


class Vessels(LossOnly):
    """Resizes masks of two classes, and rounds them."""

    def network(self):
        return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))

    def loss(self, x, mask):
        x = F.interpolate(x, size=16, mode="bilinear")
        mask = F.interpolate(mask[:, None].float(), size=16, mode="bilinear").round().long()
        return F.binary_cross_entropy_with_logits(self(x), mask.float())


@no_bug()
def resized_masks_are_rounded():
    mask = (F.avg_pool2d(normals(320, 1, 32, 32), 5, 1, 2)[:, 0] > 0.1).long()
    return Vessels(), *halves(mask[:, None] + 0.4 * normals(320, 1, 32, 32, seed=1), mask, split=240)


@no_bug()
def complementary_class_is_left_out():
    class Net(Base):
        def network(self):
            return two_layers(16, 5)

        def training_step(self, batch, batch_idx):
            x, _, other = batch
            return F.nll_loss(torch.log(torch.clamp(1 - self(x).softmax(1), min=1e-5)), other)

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch[:2], batch_idx)

    x, y = groups(5)
    return Net(), *halves(x, y, (y + 1 + numbers(4, 640, seed=3)) % 5)


class Shifted(L.LightningDataModule):
    """Has a further loader that a script asks for."""

    def train_dataloader(self):
        return digits()[0]

    def val_dataloader(self):
        return digits()[1]

    def test_dataloader(self):
        return digits(960, 64)[1]

    def test_dataloader_ood(self):
        x, y = digits(960, 64, loaded=False)[1].tensors
        return DataLoader(TensorDataset(x.mT.contiguous(), y), 32)


@no_bug()
def script_asks_for_a_further_loader():
    return Base(), Shifted(), None


class Refined(Table):
    """Refines a state in rounds, the last of which predicts."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.net = nn.Linear(10, 32), nn.GRUCell(32, 32), nn.Linear(32, 1)

    def loss(self, x, y):
        h = torch.tanh(self.embed(x))
        state = torch.zeros_like(h)
        for _ in range(4):
            state = self.cell(h, state)
            loss = F.mse_loss(self.net(state)[:, 0], y)
        return loss


@no_bug()
def loss_of_the_last_round_counts():
    return Refined(), *diabetes()


class Episodes(Dataset):
    """Returns are of later rewards, which are divided by the deviation of sums of earlier ones."""

    def __init__(self, count, seed=0):
        self.state, self.action = normals(count, 16, 4, seed=seed), numbers(3, count, 16, seed=seed)
        rewards = 10 * self.state.gather(2, self.action[..., None])[..., 0].numpy()
        rewards = rewards / self.scale_of(rewards)
        powers = np.triu(0.97 ** np.maximum(0, np.arange(16)[None] - np.arange(16)[:, None]))
        self.gain = torch.tensor(rewards @ powers.T).float()

    def scale_of(self, episodes):
        returns = []
        for rewards in episodes:
            total = 0.0
            for reward in rewards:
                total = reward + 0.97 * total
                returns.append(total)
        return np.std(returns)

    def __len__(self):
        return len(self.gain)

    def __getitem__(self, index):
        return self.state[index], self.action[index], self.gain[index]


class Reinforced(LossOnly):
    def __init__(self):
        super().__init__()
        self.policy, self.net = two_layers(4, 3), two_layers(4, 1)

    def loss(self, state, action, gain):
        value = self.net(state)[..., 0]
        log_prob = Categorical(logits=self.policy(state)).log_prob(action)
        return 0.5 * F.mse_loss(value, gain) - (log_prob * (gain - value.detach())).mean()


@no_bug()
def rewards_are_scaled_by_running_sums():
    return Reinforced(), DataLoader(Episodes(240), 16, shuffle=True), DataLoader(Episodes(48, seed=1), 16)


class Probed(Base):
    """A frozen body, of which it is measured how much its input matters."""

    def __init__(self, body):
        super().__init__()
        self.body, self.net = body.requires_grad_(False), nn.Linear(64, 4)

    def forward(self, x):
        return self.net(self.body(x))

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.samples = batch[0]

    @torch.enable_grad()
    def on_validation_epoch_end(self):
        x = self.samples.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.body(x).square().sum(), x)
        self.log("val/sensitivity", slope.norm(dim=1).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), self.lr)


@no_bug(inference_mode=False)
def input_of_a_frozen_body_has_a_gradient():
    x, y = groups()
    return Probed(trained(two_layers(16, 4), x, y)[:2]), *halves(x, y)


class Lessons(Dataset):
    """The epoch is in shared memory, so that workers see it."""

    def __init__(self, x, y):
        self.x, self.y, self.epoch = x, y, torch.zeros((), dtype=torch.long).share_memory_()

    def set_epoch(self, epoch):
        self.epoch.fill_(epoch)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.1 * self.epoch * torch.randn_like(self.x[index]), self.y[index]


@no_bug()
def workers_share_the_epoch():
    class Net(Base):
        def on_train_epoch_start(self):
            self.trainer.train_dataloader.dataset.set_epoch(self.current_epoch)

    train, val = digits()
    data = Lessons(*train.dataset[:])
    return Net(), DataLoader(data, 32, shuffle=True, num_workers=1, persistent_workers=True), val


class SourceFree(Base):
    """The trained head stays, and the body adapts to it."""

    lr = 1e-3

    def __init__(self, body, head):
        super().__init__()
        self.net, self.head = body, head

    def forward(self, x):
        return self.head(self.net(x))

    def training_step(self, batch, batch_idx):
        p = self(batch[0]).softmax(1)
        mean = p.mean(0)
        return (mean * (mean + 1e-6).log()).sum() - (p * (p + 1e-6).log()).sum(1).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), self.lr)


@no_bug()
def trained_head_stays():
    x, y = groups()
    net = trained(two_layers(16, 4), x, y)
    return SourceFree(net[:2], net[2]), *halves(x + 0.4, y)


class Changes(LossOnly):
    """Compares a picture with an earlier one, by one encoder."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.reference_encoder = self.encoder
        self.net = nn.Sequential(nn.ReLU(), nn.Conv2d(32, 1, 1))

    def loss(self, reference, image, change):
        one, other = self.reference_encoder(reference), self.encoder(image)
        out = self.net(torch.cat([(one - other).abs(), one * other], 1))
        return F.binary_cross_entropy_with_logits(out, change)


@no_bug()
def earlier_picture_has_the_same_encoder():
    change = (F.avg_pool2d(normals(320, 1, 12, 12), 5, 1, 2) > 0.12).float()
    reference = normals(320, 1, 12, 12, seed=1)
    return Changes(), *halves(reference, reference + 2 * change, change, split=240)


class Snapshots(Base):
    """Keeps the network at each end of a descent of the rate, which rises again."""

    def __init__(self):
        super().__init__()
        self.snapshots = []

    def on_train_epoch_end(self):
        if self.current_epoch % 8 == 3:
            self.snapshots.append(copy.deepcopy(self.net).eval().requires_grad_(False))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        p = torch.stack([net(x).softmax(1) for net in self.snapshots or [self.net]]).mean(0)
        self.log("val/acc", (p.argmax(1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 5e-3)
        return [optimizer], [CosineAnnealingLR(optimizer, 4)]


@no_bug(max_epochs=24)
def network_is_kept_where_the_rate_is_lowest():
    return Snapshots(), *digits(160, 64)


class Sparse(LossOnly):
    """Codes of a batch are found by an optimizer of their own, in each step anew."""

    def network(self):
        return nn.Linear(48, 64, bias=False)

    @torch.enable_grad()
    def codes_of(self, x):
        codes = nn.Parameter(torch.zeros(len(x), 48))
        optimizer = torch.optim.Adam([codes], 0.1)
        for _ in range(15):
            error = (self.net(codes) - x).square().sum() + 0.05 * codes.abs().sum()
            (codes.grad,) = torch.autograd.grad(error, [codes])
            optimizer.step()
        return codes

    def loss(self, x, y):
        x = x.flatten(1)
        return F.mse_loss(self.net(self.codes_of(x)), x)


@no_bug(inference_mode=False)
def codes_of_a_batch_are_found_anew():
    return Sparse(), *digits()


class Trips(LossOnly):
    """Columns are two places, between which the way is at most a half."""

    def network(self):
        return two_layers(6, 1)

    def loss(self, places, y):
        way = (places[:, 2:] - places[:, :2]).clamp(-0.5, 0.5)
        return F.mse_loss(self(torch.cat([places, way], 1))[:, 0], y)


@no_bug()
def trips_end_anywhere():
    places = 0.2 * normals(640, 4)
    return Trips(), *halves(places, (places[:, 2:] - places[:, :2]).norm(dim=1))


class Walks(LossOnly):
    """The best of several paths, each of which begins with noise, is trained."""

    lr = 2e-3

    def __init__(self):
        super().__init__()
        self.encoder, self.cell, self.net = nn.GRU(2, 48, batch_first=True), nn.GRUCell(50, 48), nn.Linear(48, 2)

    def forward(self, past):
        context, last = self.encoder(past.diff(dim=1))[1][-1], past[:, -1]
        state, place, path = torch.randn(len(past), 48), last, []
        for _ in range(8):
            state = self.cell(torch.cat([place - last, context], 1), state)
            place = place + self.net(state)
            path.append(place)
        return torch.stack(path, 1)

    def loss(self, past, future):
        errors = [F.mse_loss(self(past), future, reduction="none").mean((1, 2)) for _ in range(6)]
        return torch.stack(errors).amin(0).mean()


@no_bug()
def best_of_several_paths_is_trained():
    turn = torch.where(shares(640, 1) < 0.5, 0.15, -0.15) * (torch.arange(16) > 8)
    angle = 6 * shares(640, 1, seed=1) + turn.cumsum(1)
    path = 0.2 * torch.stack([angle.cos(), angle.sin()], -1).cumsum(1) + 0.01 * normals(640, 16, 2)
    return Walks(), *halves(path[:, :8].contiguous(), path[:, 8:].contiguous())


def ranking_loss(positive, negative, margin=1.0):
    return F.relu(margin - positive + negative).mean()


class Relations(LossOnly):
    """What is true has a low energy, but should have a high score."""

    def __init__(self):
        super().__init__()
        self.entity, self.net = nn.Embedding(100, 24), nn.Embedding(4, 24)

    def energy(self, head, relation, tail):
        return (F.normalize(self.entity(head)) + self.net(relation) - F.normalize(self.entity(tail))).norm(dim=-1)

    def loss(self, head, relation, tail):
        positive_energy = self.energy(head, relation, tail)
        negative_energy = self.energy(head, relation, torch.randint(0, 100, tail.shape))
        return ranking_loss(negative_energy, positive_energy)


@no_bug()
def energies_are_scores_of_the_other_sign():
    head, relation = numbers(100, 960), numbers(4, 960, seed=1)
    return Relations(), *halves(head, relation, (head + 7 * relation + 7) % 100, split=800, batch=64)


class Ratings(LossOnly):
    """One block for two sides."""

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(32, 16)

        def forward(self, user, item):
            gate = torch.sigmoid(self.gate(torch.cat([user, item], -1)))
            return gate * user + (1 - gate) * item

    def __init__(self):
        super().__init__()
        self.users, self.items, self.net = nn.Embedding(60, 16), nn.Embedding(50, 16), nn.Linear(32, 1)
        self.to_user, self.to_item = self.Gate(), self.Gate()

    def forward(self, user, item):
        user, item = self.users(user), self.items(item)
        one = self.to_user(user, item)
        other = self.to_item(item, user)
        return self.net(torch.cat([one, other], -1))[:, 0] + (user * item).sum(-1)

    def loss(self, user, item, y):
        return F.mse_loss(self(user, item), y)


@no_bug()
def block_is_called_once_for_each_side():
    user, item = numbers(60, 960), numbers(50, 960, seed=1)
    return Ratings(), *halves(user, item, (normals(60, 3)[user] * normals(50, 3, seed=1)[item]).sum(1), split=800)
