"""Common mistakes by what a reviewer looks for first: names, modes, units, labels and pairs."""

import copy

import torch
from programs import Base, Convnet, LossOnly, Manual, Table, bug, diabetes, digits, halves, loaders, mlp, sequences
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler


class TwoParts(Base):
    """A head on an encoder that is to stay as it is."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(mlp(64, 32, 32), nn.ReLU(), nn.Linear(32, 10))
        self.freeze(self.net[0])

    def freeze(self, encoder):
        encoder.requires_grad_(False)


@bug("freezes-nothing")
def layer_has_an_attribute_for_its_gradient():
    class M(TwoParts):
        def freeze(self, encoder):
            encoder.requires_grad = False

    return M(), *digits()


@bug("freezes-nothing")
def parameters_have_an_attribute_of_a_like_name():
    class M(TwoParts):
        def freeze(self, encoder):
            for p in encoder.parameters():
                p.require_grad = False

    return M(), *digits()


class Scaled(Table):
    """Predicts the logarithm of the targets, and measures the error in their unit."""

    def loss(self, x, y):
        return F.mse_loss(self(x)[:, 0], y.log())

    def predicted(self, x):
        return self(x)[:, 0].exp()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/mae", (self.predicted(x) - y).abs().mean())


def progress():
    train, val = diabetes(loaded=False)
    (x, y), (u, v) = train.tensors, val.tensors
    return loaders(*(TensorDataset(a, 100 + 50 * (b - b.min())) for a, b in ((x, y), (u, v))))


@bug("other-units")
def error_of_logarithms_and_values():
    class M(Scaled):
        def predicted(self, x):
            return self(x)[:, 0]

    return M(), *progress()


class Denoiser(LossOnly):
    """Predicts digits without the noise that it adds."""

    def network(self):
        return mlp(64, 64, 64)

    def corrupted(self, x):
        return x + 0.5 * torch.randn_like(x)

    def target(self, x, noisy):
        return x

    def loss(self, x, y):
        noisy = self.corrupted(x)
        return F.mse_loss(self(noisy).view_as(x), self.target(x, noisy))


@bug("noisy-target")
def noise_is_predicted_with_the_digits():
    class M(Denoiser):
        def target(self, x, noisy):
            return noisy

    return M(), *digits()


@bug("noisy-target")
def gaps_are_predicted_with_the_digits():
    class M(Denoiser):
        def corrupted(self, x):
            return x * (torch.rand_like(x) > 0.5)

        def target(self, x, noisy):
            return noisy

    return M(), *digits()


class Mixed(Base):
    """Trains with inputs and labels of two samples each."""

    both = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        share = float(torch.distributions.Beta(1.0, 1.0).sample())
        order = torch.randperm(len(x))
        out = self(share * x + (1 - share) * x[order])
        loss = F.cross_entropy(out, y)
        return share * loss + (1 - share) * F.cross_entropy(out, y[order]) if self.both else loss


@bug("mixed-labels")
def inputs_are_mixed_and_labels_are_not():
    class M(Mixed):
        both = False

    return M(), *digits()


class Gan(Manual):
    """Generates points, which a discriminator tells from others."""

    wanted = 1.0

    def __init__(self):
        super().__init__()
        self.generator, self.judge = mlp(4, 16, 2), mlp(2, 16, 1)

    def training_step(self, batch, batch_idx):
        real = batch
        one, two = self.optimizers()
        fake = self.generator(torch.randn(len(real), 4))
        two.zero_grad()
        self.manual_backward(self.score(real, 1.0) + self.score(fake.detach(), 0.0))
        two.step()
        one.zero_grad()
        self.manual_backward(self.score(fake, self.wanted))
        one.step()

    def score(self, points, label):
        return F.binary_cross_entropy_with_logits(self.judge(points), torch.full((len(points), 1), label))

    def configure_optimizers(self):
        return torch.optim.Adam(self.generator.parameters(), 1e-3), torch.optim.Adam(self.judge.parameters(), 1e-3)


def points():
    x = 2 + 0.3 * torch.randn(640, 2, generator=torch.Generator().manual_seed(0))
    return halves(x)


@bug("adversaries-agree")
def generator_is_trained_to_be_found_out():
    class M(Gan):
        wanted = 0.0

    return M(), *points()


class Focal(Base):
    """Weighs each sample by how far its label is from being certain."""

    def loss(self, x, y):
        each = F.cross_entropy(self(x), y, reduction="none")
        return (self.weight(torch.exp(-each)) ** 2 * each).mean()

    def weight(self, p):
        return 1 - p


@bug("loss-maximized")
def focal_loss_of_easy_samples():
    class M(Focal):
        def weight(self, p):
            return p

    return M(), *digits()


class Triplets(Dataset):
    """Digits with one of their class and one of another class."""

    def __init__(self, data):
        self.x, self.y = data.tensors
        g = torch.Generator().manual_seed(0)
        same = self.y[:, None] == self.y
        self.positive, self.negative = (torch.multinomial(m.float(), 1, generator=g)[:, 0] for m in (same, ~same))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.x[self.positive[i]], self.x[self.negative[i]]


class Metric(LossOnly):
    """Embeds digits, those of one class near each other."""

    def network(self):
        return mlp(64, 64, 16)

    def loss(self, anchor, positive, negative):
        anchor, positive, negative = self(anchor), self(positive), self(negative)
        return F.triplet_margin_loss(anchor, positive, negative)


def triplets():
    return loaders(*(Triplets(part) for part in digits(loaded=False)))


@bug("exchanged-arguments")
def triplet_has_the_other_class_first():
    class M(Metric):
        def loss(self, anchor, positive, negative):
            anchor, positive, negative = self(anchor), self(positive), self(negative)
            return F.triplet_margin_loss(anchor, negative, positive)

    return M(), *triplets()


@bug("exchanged-arguments")
def rate_and_decay_are_exchanged():
    class M(Base):
        rate, weight_decay = 1e-2, 1e-4

        def configure_optimizers(self):
            lr = self.rate
            return torch.optim.AdamW(self.parameters(), lr=self.weight_decay, weight_decay=lr)

    return M(), *digits()


class Normalized(Dataset):
    """Digits by their mean and deviation."""

    def __init__(self, data, mean=0.3, std=0.37):
        (self.x, self.y), self.mean, self.std = data.tensors, mean, std

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return (self.x[i] - self.mean) / self.std, self.y[i]


@bug("exchanged-arguments")
def mean_and_deviation_are_exchanged():
    class Exchanged(Normalized):
        def __getitem__(self, i):
            return (self.x[i] - self.std) / self.mean, self.y[i]

    return Base(), *loaders(*(Exchanged(part) for part in digits(loaded=False)))


class Uncertain(Table):
    """Predicts a mean and a deviation."""

    def network(self):
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))

    def predicted(self, x):
        mean, std = self(x).unbind(1)
        return mean, F.softplus(std) + 1e-3

    def loss(self, x, y):
        mean, std = self.predicted(x)
        return F.gaussian_nll_loss(mean, y, std**2)


@bug("deviation")
def deviation_for_the_variance():
    class M(Uncertain):
        def loss(self, x, y):
            mean, std = self.predicted(x)
            return F.gaussian_nll_loss(mean, y, std)

    return M(), *diabetes()


@bug("deviation")
def variance_for_the_deviation_of_a_distribution():
    class M(Uncertain):
        def predicted(self, x):
            mean, var = self(x).unbind(1)
            return mean, F.softplus(var) + 1e-3

        def loss(self, x, y):
            mean, variance = self.predicted(x)
            return -torch.distributions.Normal(mean, variance).log_prob(y).mean()

    return M(), *diabetes()


class Clipped(Manual):
    """Clips gradients by hand."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        optimizer.step()


@bug("clipped-too-early")
def gradients_are_clipped_after_the_step():
    class M(Clipped):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(*batch))
            optimizer.step()
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    return M(), *digits()


@bug("hidden-unused")
def last_place_of_a_reader_of_both_directions():
    class M(Base):
        def network(self):
            self.rnn = nn.GRU(5, 16, batch_first=True, bidirectional=True)
            return nn.Linear(32, 4)

        def forward(self, x):
            return self.net(self.rnn(x)[0][:, -1])

    return M(), *halves(*sequences())


class Stateful(Base):
    """Begins with a state."""

    def network(self):
        self.rnn = nn.GRU(5, 16, batch_first=True)
        return nn.Linear(16, 4)

    def state(self, count):
        return torch.zeros(1, count, 16)

    def forward(self, x):
        return self.net(self.rnn(x, self.state(len(x)))[0][:, -1])


@bug("random-state")
def state_is_drawn():
    class M(Stateful):
        def state(self, count):
            return torch.randn(1, count, 16)

    return M(), *halves(*sequences())


class Tags(LossOnly):
    """Sets several labels for each sample."""

    def network(self):
        return mlp(12, 32, 6)

    def loss(self, x, y):
        return F.binary_cross_entropy(self(x).sigmoid(), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/acc", ((self(x).sigmoid() > 0.5) == (y > 0.5)).float().mean())


def tagged():
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(640, 12, generator=g), torch.randn(12, 6, generator=g)
    return halves(x, (x @ w > 0).float())


@bug("softmax-of-labels")
def several_labels_share_a_softmax():
    class M(Tags):
        def loss(self, x, y):
            return F.binary_cross_entropy(self(x).softmax(1), y)

    return M(), *tagged()


@bug("argmax-of-labels")
def first_of_several_labels_is_compared():
    class M(Tags):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/acc", (self(x).argmax(1) == y.argmax(1)).float().mean())

    return M(), *tagged()


class Rated(Base):
    """Two kinds of numbers, whose product is a rating."""

    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(40, 8), nn.Embedding(40, 8)

    def network(self):
        return nn.Identity()

    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(1)

    def training_step(self, batch, batch_idx):
        user, item, rating = batch
        return F.mse_loss(self(user, item), rating)

    def validation_step(self, batch, batch_idx):
        user, item, rating = batch
        self.log("val/mse", F.mse_loss(self(user, item), rating))


def ratings():
    g = torch.Generator().manual_seed(0)
    tastes, kinds = torch.randn(40, 4, generator=g), torch.randn(40, 4, generator=g)
    user, item = torch.randint(0, 40, (2, 960), generator=g)
    return halves(user, item, (tastes[user] * kinds[item]).sum(1), split=720)


@bug("unused-part")
def second_number_is_passed_and_not_read():
    class M(Rated):
        def forward(self, user, item):
            return self.score(user, item)

        def score(self, user, item):
            return (self.user(user) * self.item(user)).sum(1)

    return M(), *ratings()


class Collected(Base):
    """Logs the accuracy of all batches at the end."""

    def on_validation_epoch_start(self):
        self.found = []

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.found.append(self(x).argmax(1) == y)

    def on_validation_epoch_end(self):
        self.log("val/acc", torch.cat(self.found).float().mean())


@bug("last-batch")
def accuracy_of_the_last_batch():
    class M(Collected):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.found = self(x).argmax(1) == y

        def on_validation_epoch_end(self):
            accuracy = self.found.float().mean()
            self.log("val/acc", accuracy)

    return M(), *digits()


class Words(LossOnly):
    """Predicts the next token of sequences of any length, by a loss for each place."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.net = nn.Embedding(12, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 12)

    def network(self):
        return nn.Identity()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def loss(self, tokens):
        out = self.net(self.rnn(self.embed(tokens[:, :-1]))[0])
        each = F.cross_entropy(out.transpose(1, 2), tokens[:, 1:], reduction="none")
        return self.mean(each, (tokens[:, 1:] > 0).float())

    def mean(self, each, mask):
        return (each * mask).sum() / mask.sum()


def words():
    g = torch.Generator().manual_seed(0)
    length = torch.randint(4, 12, (640, 1), generator=g)
    tokens = (torch.randint(0, 11, (640, 1), generator=g) + torch.arange(12)) % 11 + 1
    train, val = ((tokens * (torch.arange(12) < length))[part] for part in (slice(0, 480), slice(480, None)))
    return DataLoader(train, 32, shuffle=True), DataLoader(val, 32)


@bug("padding-in-mean")
def mean_over_what_is_masked():
    class M(Words):
        def mean(self, each, mask):
            return (each * mask).mean()

    return M(), *words()


@bug("future-leak")
def mask_multiplies_scores():
    class M(Words):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

        def loss(self, tokens):
            hidden = self.embed(tokens[:, :-1])
            scores = self.query(hidden) @ self.key(hidden).transpose(1, 2) / 4
            weights = (scores * torch.ones_like(scores[0]).tril()).softmax(-1)
            out = self.net(hidden + weights @ self.value(hidden))
            return F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)

    return M(), *words()


@bug("partial-validation")
def validation_leaves_a_batch_out():
    train, val = digits(val=100, loaded=False)
    return Base(), DataLoader(train, 32, shuffle=True), DataLoader(val, 64, drop_last=True)


@bug("partial-validation")
def validation_is_drawn():
    train, val = digits(loaded=False)
    weights = 1 + 4 * (val.tensors[1] == 0)
    sampler = WeightedRandomSampler(weights.tolist(), len(val))
    return Base(), DataLoader(train, 32, shuffle=True), DataLoader(val, 64, sampler=sampler)


@bug("dropout")
def share_that_is_kept_is_dropped():
    class M(Base):
        def network(self):
            keep_prob = 0.8
            return nn.Sequential(mlp(64, 64, 64), nn.Dropout(keep_prob), nn.Linear(64, 10))

    return M(), *digits()


@bug("eval-in-training")
def network_stays_in_evaluation():
    class M(Base):
        def network(self):
            return Convnet().requires_grad_(True)

        def on_train_epoch_start(self):
            self.net.eval()

    return M(), *digits()


class Best(Base):
    """Keeps the weights of the best validation."""

    def kept(self):
        return copy.deepcopy(self.net.state_dict())

    def on_validation_epoch_end(self):
        self.best = self.kept()

    def on_train_end(self):
        self.net.load_state_dict(self.best)


@bug("shared-state")
def best_weights_are_those_that_change():
    class M(Best):
        def on_validation_epoch_end(self):
            self.best = self.net.state_dict()

    return M(), *digits()


class Average:
    """A moving average that is no part of the module."""

    def __init__(self, net):
        self.net = copy.deepcopy(net).eval().requires_grad_(False)

    def follow(self, net, *, buffers):
        with torch.no_grad():
            for own, other in zip(self.net.parameters(), net.parameters(), strict=True):
                own.lerp_(other, 0.1)
            for own, other in zip(self.net.buffers(), net.buffers(), strict=True):
                if buffers:
                    own.copy_(other)


class Averaged(Base):
    """Validates an average, with the statistics of its original or without."""

    with_statistics = True

    def __init__(self):
        super().__init__()
        self.average = Average(self.net)

    def network(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))

    def on_train_batch_end(self, *_):
        self.average.follow(self.net, buffers=self.with_statistics)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/acc", (self.average.net(x).argmax(1) == y).float().mean())


@bug("average-statistics")
def average_beside_the_module_has_no_statistics():
    class M(Averaged):
        with_statistics = False

    return M(), *digits()


@bug("padding-is-token")
def number_of_a_user_is_padding():
    class M(Rated):
        def __init__(self):
            super().__init__()
            self.item = nn.Embedding(40, 8, padding_idx=0)

    return M(), *ratings()


class Clicks(Dataset):
    """Times of clicks in milliseconds, of which the gaps tell the class."""

    kind = torch.float64

    def __init__(self, count=640, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 2, (count,), generator=g)
        gaps = 500 + 1000 * torch.rand(count, 12, generator=g) * self.y[:, None]
        self.times = (1.7e12 + gaps.double().cumsum(1)).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        times = torch.as_tensor(self.times[i].numpy(), dtype=self.kind)
        return (times.diff() / 1000).float(), self.y[i]


class OfClicks(Base):
    def network(self):
        return mlp(11, 32, 2)


@bug("digits-lost")
def times_in_few_digits():
    class Rounded(Clicks):
        kind = torch.float32

    return OfClicks(), *loaders(Rounded(), Rounded(160, seed=1))
