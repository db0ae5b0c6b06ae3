"""Bugs of two sets whose writers did not know the checks, which none named before: docs/diagnosis.md counts."""

import copy
import math

import numpy as np
import torch
from programs import Base, LossOnly, Manual, Table, bug, digits, halves, mlp, tokens
from programs.planted.ninth import Coupling, Flow, points, scaled
from sklearn.metrics import average_precision_score, r2_score, roc_auc_score
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy


class Pair(Manual):
    """Two tasks with a body in common, each with a backward pass."""

    def __init__(self):
        super().__init__()
        self.other, self.head = nn.Linear(64, 1), nn.Linear(64, 10)

    def network(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())

    def losses(self, x, y):
        """Losses of the sum of pixels, and of the class."""
        hidden = self.net(x)
        return F.mse_loss(self.other(hidden)[:, 0], x.sum((1, 2, 3)) / 20), F.cross_entropy(self.head(hidden), y)


@bug("gradients-lost")
def cleared_between_tasks():
    """zero_grad is called before the backward pass of each of two tasks, and the step follows both."""

    class M(Pair):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            for k in range(2):
                optimizer.zero_grad()
                self.manual_backward(self.losses(*batch)[k])
            optimizer.step()

    return M(), *digits()


class Counted(Base):
    """Computes the accuracy of training at the end of each epoch."""

    resets = True

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(10)

    def loss(self, x, y):
        out = self(x)
        self.accuracy.update(out, y)
        return F.cross_entropy(out, y)

    def validation_step(self, batch, batch_idx):
        pass

    def on_train_epoch_end(self):
        self.log("train/acc", self.accuracy.compute().item())
        if self.resets:
            self.accuracy.reset()


@bug("metric-not-reset", max_epochs=4)
def metric_of_training_is_not_reset():
    """The accuracy of an epoch of training is that of all epochs so far."""

    class M(Counted):
        resets = False

    return M(), *digits(160)


@bug("mostly-zero", max_epochs=8)
def almost_no_sample_is_kept():
    """The comparison that drops a few samples at random is reversed, so that most batches have a loss of 0."""

    class M(LossOnly):
        def training_step(self, batch, batch_idx):
            x, y = batch
            kept = torch.rand(len(x)) < 0.003
            return (F.cross_entropy(self(x), y, reduction="none") * kept).mean()

    return M(), *digits(batch=64)


class Autoencoder(LossOnly):
    """A variational autoencoder, whose reconstruction is summed over pixels."""

    sums = True

    def network(self):
        return nn.ModuleList([mlp(outputs=8), mlp(4, 64, 64)])

    def loss(self, x, y):
        x = x.flatten(1)
        mean, log_var = self.net[0](x).chunk(2, 1)
        out = self.net[1](mean + torch.randn_like(mean) * torch.exp(0.5 * log_var))
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
        return F.mse_loss(out, x) * (64 * 10 if self.sums else 10) + kl


@bug("reconstruction", max_epochs=16)
def divergence_is_summed_and_pixels_are_not():
    """The mean over pixels is so small beside a sum over latent values that nothing is encoded."""

    class M(Autoencoder):
        sums = False

    return M(), *digits()


class Frames(Dataset):
    """Pairs of frames of bytes in an array, or a tensor, and their difference; ``wide``: of floating-point numbers."""

    def __init__(self, count, *, is_array=True, wide=False):
        g = np.random.default_rng(count)
        self.frames = g.integers(0, 256, (count, 2, 8, 8)).astype(np.uint8)
        self.labels = torch.as_tensor(g.integers(0, 10, count))
        self.frames = self.frames if is_array else torch.as_tensor(self.frames)
        self.wide = wide

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, index):
        first, second = self.frames[index]
        if self.wide:
            first, second = first / 255, second / 255
        return torch.as_tensor(second - first)[None].float(), self.labels[index]


def frames(**options):
    return DataLoader(Frames(320, **options), 32, shuffle=True), DataLoader(Frames(64, **options), 32)


@bug("bytes-wrap")
def difference_of_bytes():
    """The dataset subtracts bytes in an array."""
    return Base(), *frames()


@bug("bytes-wrap")
def difference_of_bytes_of_tensors():
    """The dataset subtracts bytes in a tensor."""
    return Base(), *frames(is_array=False)


class Scored(LossOnly):
    """Tells apart small and large digits, and computes a metric of scikit-learn at the end of validation."""

    def network(self):
        return mlp(outputs=1)

    def loss(self, x, y):
        return F.binary_cross_entropy_with_logits(self(x)[:, 0], (y > 4).float())

    def on_validation_epoch_start(self):
        self.seen = []

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append((self(x)[:, 0].sigmoid(), y > 4))

    def on_validation_epoch_end(self):
        p, y = (torch.cat(part).numpy() for part in zip(*self.seen, strict=True))
        self.log("val/score", float(self.score(y, p)))

    def score(self, y, p):
        return roc_auc_score(y, p)


@bug("hard-scores")
def area_under_the_curve_of_labels():
    """Scores are compared with a threshold before their ranks are."""

    class M(Scored):
        def score(self, y, p):
            return average_precision_score(y, p > 0.5)

    return M(), *digits()


class Rated(Table):
    """Computes R2 at the end of validation."""

    def on_validation_epoch_start(self):
        self.seen = []

    def validation_step(self, batch, batch_idx):
        self.seen.append((self(batch[0])[:, 0], batch[1]))

    def on_validation_epoch_end(self):
        p, y = (torch.cat(part).numpy() for part in zip(*self.seen, strict=True))
        self.log("val/r2", float(self.score(y, p)))

    def score(self, y, p):
        return r2_score(y, p)


@bug("exchanged-arguments")
def targets_are_rated():
    """R2 gets predictions first, and the targets after them."""

    class M(Rated):
        def score(self, y, p):
            return r2_score(p, y)

    return M(), *scaled()


class Summed(Coupling):
    """Returns the sum of the log-determinants of a batch."""

    def forward(self, x):
        z, log_det = super().forward(x)
        return z, log_det.sum()


@bug("sum-and-mean")
def determinants_of_all_samples():
    """The log-determinant is summed over the batch, and the density is a mean."""

    class M(Flow):
        def network(self):
            return nn.ModuleList([Summed(False, 1.0), Summed(True, 1.0)])

        def loss(self, x):
            total = 0
            for layer in self.net:
                x, log_det = layer(x)
                total = total + log_det
            return (0.5 * x.square().sum(1)).mean() - total

    return M(), *points()


class Views(LossOnly):
    """Draws two views of each sample together, and others apart; ``pairs`` says which rows belong together."""

    def network(self):
        return mlp(outputs=16)

    def join(self, one, other):
        return torch.cat([one, other])

    def pairs(self, count):
        return (torch.arange(count) + count // 2) % count

    def loss(self, x, y):
        one, other = (F.normalize(self(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
        z = self.join(one, other)
        similarities = (z @ z.T / 0.2).masked_fill(torch.eye(len(z), dtype=torch.bool), -math.inf)
        return F.cross_entropy(similarities, self.pairs(len(z)))


@bug("pair-target")
def views_of_neighbours():
    """The pair of each row is said to be the next row, though views are joined one after another."""

    class M(Views):
        def pairs(self, count):
            return (torch.arange(count) + 1) % count

    return M(), *digits()


def pairs_of_nodes(nodes=60):
    """Edges of training and validation of a graph of four groups, and as many pairs that are none, with labels."""
    g = torch.Generator().manual_seed(0)
    group = torch.randint(0, 4, (nodes,), generator=g)
    chance = torch.where(group[:, None] == group, 0.4, 0.05)
    upper = (torch.rand(nodes, nodes, generator=g) < chance).triu(1)
    edges, free = upper.nonzero(), (~upper).triu(1).nonzero()
    edges, free = (t[torch.randperm(len(t), generator=g)] for t in (edges, free))
    count = len(edges) * 3 // 4
    parts = [(edges[:count], free[:count]), (edges[count:], free[count : len(edges)])]
    return [(torch.cat(p), torch.cat([torch.ones(len(p[0])), torch.zeros(len(p[1]))])) for p in parts]


class Links(LossOnly):
    """Predicts edges by one round of messages along the edges of training, or of all if ``knows_all``."""

    knows_all = False

    def __init__(self):
        super().__init__()
        parts = pairs_of_nodes()[: 2 if self.knows_all else 1]
        edges = torch.cat([pairs[labels == 1] for pairs, labels in parts])
        matrix = torch.eye(60)
        matrix[edges[:, 0], edges[:, 1]] = matrix[edges[:, 1], edges[:, 0]] = 1
        self.register_buffer("graph", matrix / matrix.sum(1, keepdim=True))
        self.features = nn.Parameter(torch.randn(60, 16) * 0.3)

    def network(self):
        return nn.Linear(16, 16)

    def forward(self, pairs):
        hidden = self.net(self.graph @ self.features)
        return (hidden[pairs[:, 0]] * hidden[pairs[:, 1]]).sum(1)

    def loss(self, x, y):
        return F.binary_cross_entropy_with_logits(self(x), y)


def links():
    (x, y), (held, labels) = pairs_of_nodes()
    return halves(torch.cat([x, held]), torch.cat([y, labels]), split=len(x), batch=128)


@bug("known-edges")
def messages_along_edges_of_validation():
    """The graph has the edges that are to be predicted in validation."""

    class M(Links):
        knows_all = True

    return M(), *links()


class Episodes(Dataset):
    """Support and query of five classes; ``first`` is the first sample that may be a query."""

    def __init__(self, count, first=3):
        g = torch.Generator().manual_seed(count)
        self.data = torch.randn(20, 1, 16, generator=g) + 0.5 * torch.randn(20, 12, 16, generator=g)
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        chosen = torch.randperm(20, generator=torch.Generator().manual_seed(index))[:5]
        return self.data[chosen, :3], self.data[chosen, self.first : self.first + 5]


class Prototypes(LossOnly):
    """Learns by prototypes."""

    def network(self):
        return nn.Linear(16, 8)

    def loss(self, batch):
        support, query = batch
        distances = torch.cdist(self.net(query).flatten(1, 2), self.net(support).mean(2)).square()
        labels = torch.arange(5).repeat_interleave(query.shape[2]).expand(len(query), -1)
        return F.cross_entropy(-distances.transpose(1, 2), labels)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))


def episodes(first=3):
    return DataLoader(Episodes(160, first), 8, shuffle=True), DataLoader(Episodes(32), 8)


@bug("shared-rows")
def query_is_in_its_support():
    """Queries are chosen from the first sample on, which is in the support."""
    return Prototypes(), *episodes(0)


class Weighted(LossOnly):
    """Three classes of unequal size, with weights."""

    def network(self):
        return nn.Linear(6, 3)

    def weights(self, counts):
        return 1 / counts

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", self.weights(classes()[1][:320].bincount().float()))

    def loss(self, x, y):
        return F.cross_entropy(self(x), y, weight=self.weight)


def classes():
    g = torch.Generator().manual_seed(0)
    y = torch.multinomial(torch.tensor([0.08, 0.2, 0.72]), 400, replacement=True, generator=g)
    return torch.randn(400, 6, generator=g) + F.one_hot(y, 6), y


def unequal():
    return halves(*classes(), split=320)


@bug("class-weights")
def weights_in_the_order_of_sizes():
    """Weights are the inverse sizes in the order of Counter.most_common, not of the classes."""

    class M(Weighted):
        def weights(self, counts):
            return 1 / counts.sort(descending=True).values

    return M(), *unequal()


class Rare(LossOnly):
    """A rare class with a weight."""

    def network(self):
        return nn.Linear(6, 1)

    def weight(self, y):
        return (y == 0).sum() / (y == 1).sum()

    def loss(self, x, y):
        weight = self.weight((classes()[1][:320] == 0).float())
        return F.binary_cross_entropy_with_logits(self(x)[:, 0], y, pos_weight=weight)


def binary():
    x, y = classes()
    return halves(x, (y == 0).float(), split=320)


@bug("class-weights")
def rare_class_weighs_less():
    """pos_weight is the share of the positive samples, not its inverse."""

    class M(Rare):
        def weight(self, y):
            return (y == 1).sum() / (y == 0).sum()

    return M(), *binary()


class Topics(LossOnly):
    """Classifies bags of tokens."""

    def network(self):
        return nn.ModuleList([nn.EmbeddingBag(60, 16), nn.Linear(16, 4)])

    def forward(self, x):
        return self.net[1](self.net[0](x))

    def loss(self, x, y):
        return F.cross_entropy(self(x), y)


def topics():
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (500,), generator=g)
    own = torch.randint(0, 5, (500, 6), generator=g) + 5 * y[:, None]
    return torch.cat([own, torch.randint(20, 60, (500, 6), generator=g)], 1), y


@bug("classes-renumbered")
def numbers_of_topics_by_split():
    """Topics are numbered by their first appearance in each split."""
    x, y = topics()
    y[400:] = torch.tensor([2, 0, 3, 1])[y[400:]]
    return Topics(), *halves(x, y, split=400)


class Translation(LossOnly):
    """A recurrent decoder beside an encoder; ``given`` are the tokens that it gets."""

    def network(self):
        cells = [nn.GRU(16, 32, batch_first=True) for _ in range(2)]
        return nn.ModuleList([nn.Embedding(12, 16), *cells, nn.Linear(32, 12)])

    def given(self, y):
        return y[:, :-1]

    def loss(self, x, y):
        embed, encoder, decoder, head = self.net
        out = head(decoder(embed(self.given(y)), encoder(embed(x))[1])[0])
        return F.cross_entropy(out.transpose(1, 2), y[:, 1:])


def sentences():
    x = tokens()
    return halves(x[:, :6], x[:, 6:13])


@bug("future-leak")
def decoder_gets_what_it_predicts():
    """The tokens of a recurrent decoder are not shifted."""

    class M(Translation):
        def given(self, y):
            return y[:, 1:]

    return M(), *sentences()


class Pooled(LossOnly):
    """Attention over events of unequal number, which are filled with -9."""

    inverted = False

    def network(self):
        return nn.ModuleList([nn.Linear(4, 16), nn.Linear(16, 1), nn.Linear(16, 3)])

    def forward(self, x, count):
        body, score, head = self.net
        valid = torch.arange(x.shape[1]) < count[:, None]
        hidden = body(x.clamp(-3, 3)).relu()
        weights = score(hidden)[:, :, 0].masked_fill(valid if self.inverted else ~valid, -1e4).softmax(1)
        return head((weights[:, :, None] * hidden).sum(1))

    def training_step(self, batch, batch_idx):
        x, count, y = batch
        return F.cross_entropy(self(x, count), y)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))


def events():
    g = torch.Generator().manual_seed(0)
    x, count = torch.randn(400, 8, 4, generator=g), torch.randint(3, 9, (400,), generator=g)
    y = x[:, :3, :3].amax(1).argmax(1)
    x[torch.arange(8) >= count[:, None]] = -9.0
    return halves(x, count, y, split=320)


@bug("mask-inverted")
def attention_over_what_fills():
    """The mask of a hand-made attention is inverted; samples without padding attend to all events."""

    class M(Pooled):
        inverted = True

    return M(), *events()


@bug("constant-term")
def derivative_of_all_outputs():
    """A residual has no gradient by its derivative, which is that of outputs weighted by ones of their shape."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

        def training_step(self, batch, batch_idx):
            t = batch.clone().requires_grad_()
            u = self.net(t)
            derivative = torch.autograd.grad(u, t, torch.ones_like(u), retain_graph=True)[0]
            residual = derivative + 0.5 * u - torch.cos(t)
            return residual.square().mean() + (self.net(torch.zeros(1, 1)) - 1).square().mean()

        def validation_step(self, batch, batch_idx):
            pass

    return M(), *halves(torch.rand(480, 1, generator=torch.Generator().manual_seed(0)), split=400)


class Ratings(LossOnly):
    """Ratings of items, in a table beside their numbers."""

    def network(self):
        return nn.Embedding(9000, 1)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[:, 0].long())[:, 0], batch[:, 1].float())

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))


def ratings():
    g = torch.Generator().manual_seed(0)
    return torch.stack([torch.randint(0, 8000, (3000,), generator=g), torch.randn(3000, generator=g)], 1)


@bug("rounded-integers")
def items_beside_ratings_in_half_precision():
    """A table of numbers of items, and of ratings, is in half precision."""
    return Ratings(), *halves(ratings().half(), split=2400, batch=128)


class Diffusion(LossOnly):
    """Predicts the noise of points, at levels that are drawn."""

    def __init__(self):
        super().__init__()
        rates = torch.linspace(1e-3, 0.3, 30)
        self.register_buffer("rates", rates)
        self.register_buffer("kept", (1 - rates).cumprod(0))

    def network(self):
        return nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 2))

    def levels(self, count):
        kept = self.kept[torch.randint(0, 30, (count,))][:, None]
        return kept.sqrt(), (1 - kept).sqrt()

    def training_step(self, batch, batch_idx):
        noise, (level, other) = torch.randn_like(batch), self.levels(len(batch))
        return F.mse_loss(self.net(torch.cat([level * batch + other * noise, level], 1)), noise)

    def validation_step(self, batch, batch_idx):
        pass


@bug("noise-levels")
def samples_and_noise_without_roots():
    """The mixture does not keep the variance, as the steps of the diffusion do."""

    class M(Diffusion):
        def levels(self, count):
            level = self.kept[torch.randint(0, 30, (count,))][:, None]
            return level, 1 - level

    return M(), *points()


class Target(LossOnly):
    """Predicts what a copy, which follows slowly, says of another view."""

    def __init__(self):
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def network(self):
        return mlp(outputs=16)

    def loss(self, x, y):
        with torch.no_grad():
            aim = self.target(x)
        return F.mse_loss(self.net(x + 0.3 * torch.randn_like(x)), aim + 0.1 * F.one_hot(y, 16))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for p, q in zip(self.net.parameters(), self.target.parameters(), strict=True):
                q.lerp_(p, 0.1)


@bug("average-unchanged")
def trained_network_follows_its_target():
    """The weights of the target are mixed into those that are trained, not the reverse."""

    class M(Target):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            with torch.no_grad():
                for p, q in zip(self.net.parameters(), self.target.parameters(), strict=True):
                    p.lerp_(q, 0.1)

    return M(), *digits()
