"""Random numbers of the wrong kind, spreads that are no deviations, and forms that were missed of known mistakes."""

import copy
import math

import lightning as L
import torch
from programs import Base, Causal, LossOnly, Table, bug, diabetes, digits, halves, tokens
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanAbsoluteError, MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy


class Warm(Base):
    """Its schedule reads the module."""

    warm = 10

    def factor(self, step):
        return min(1.0, (step + 1) / self.warm)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.schedule())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def schedule(self):
        return lambda step: min(1.0, (step + 1) / self.warm)


@bug("schedule-absolute")
def schedule_reads_the_rate_of_the_module():
    class Net(Warm):
        def schedule(self):
            def rate(step):
                return self.lr * (step + 1) / self.warm if step < self.warm else self.lr

            return rate

    return Net(), *digits()


def sentences():
    """Tokens, and those that follow them."""
    text = tokens(17)
    return halves(text[:, :-1], text[:, 1:])


class Attention(nn.Module):
    """Causal, with one head."""

    def __init__(self, share=0.2):
        super().__init__()
        self.share, self.qkv = share, nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.active())

    def active(self):
        return self.share if self.training else 0.0


class Speaker(Causal):
    """A language model with attention of its own."""

    attention = Attention

    def __init__(self):
        super().__init__()
        self.body = self.attention()

    def forward(self, x):
        return self.net(self.body(self.embed(x) + self.places(torch.arange(x.shape[1]))))


@bug("dropout-in-validation")
def attention_drops_in_validation():
    class Dropping(Attention):
        def active(self):
            return self.share

    class Net(Speaker):
        attention = Dropping

    return Net(), *sentences()


def tags():
    """Eight rare tags of 24 numbers."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(640, 24, generator=g)
    return x, (x[:, :8] + 0.3 * torch.randn(640, 8, generator=g) > 1.2).float()


class Tagger(LossOnly):
    """Finds tags."""

    def __init__(self, weight):
        super().__init__()
        self.criterion = nn.BCEWithLogitsLoss(pos_weight=weight)

    def network(self):
        return nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8))

    def loss(self, x, y):
        return self.criterion(self(x), y)


@bug("class-weights")
def rare_tags_weigh_less():
    x, y = tags()
    positive = y[:480].sum(0)
    return Tagger(positive / (480 - positive)), *halves(x, y)


class Averaged(Base):
    """Its validation asks an average of its network."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, *given):
        for t, s in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            t.copy_(0.9 * t + 0.1 * s)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        return F.cross_entropy(out, y) + F.mse_loss(out.softmax(1), self.teacher(x).softmax(1))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/acc", (self.teacher(x).argmax(1) == y).float().mean())


@bug("no-effect")
def average_is_assigned_to_the_name_of_a_loop():
    class Net(Averaged):
        @torch.no_grad()
        def on_train_batch_end(self, *given):
            for t, s in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                t = 0.9 * t + 0.1 * s

    return Net(), *digits()


class Normalized(Base):
    """A network with norms, and weights that it draws."""

    mean = 1.0

    def __init__(self):
        super().__init__()
        self.net.apply(self.draw)

    def network(self):
        layers = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.ReLU()
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(32, 10))

    def draw(self, layer):
        if "Norm" in type(layer).__name__:
            nn.init.normal_(layer.weight, self.mean, 0.02)


@bug("norm-scale")
def scales_of_norms_are_drawn_around_zero():
    class Net(Normalized):
        mean = 0.0

    return Net(), *digits()


class Diffusion(LossOnly):
    """Predicts the noise of noised rows of a table."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-3, 0.2, 50), 0))

    def network(self):
        return nn.Sequential(nn.Linear(11, 64), nn.SiLU(), nn.Linear(64, 10))

    def noise(self, x):
        return torch.randn_like(x)

    def loss(self, x, y):
        t = torch.randint(50, (len(x),))
        kept, noise = self.kept[t][:, None], self.noise(x)
        noised = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self(torch.cat([noised, t[:, None] / 50], 1)), noise)


@bug("noise-distribution")
def noise_to_predict_is_uniform():
    class Net(Diffusion):
        def noise(self, x):
            return torch.rand_like(x)

    return Net(), *diabetes()


class Autoencoder(LossOnly):
    """A variational autoencoder of digits."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))

    def network(self):
        return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))

    def sample(self, mean, log_var):
        return mean + torch.randn_like(mean) * (0.5 * log_var).exp()

    def loss(self, x, y):
        mean, log_var = self.encoder(x).chunk(2, 1)
        error = F.mse_loss(self(self.sample(mean, log_var)), x.flatten(1), reduction="none").sum(1)
        return (error - 0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1)).mean()


@bug("noise-distribution")
def deviation_is_multiplied_by_uniform_noise():
    class Net(Autoencoder):
        def sample(self, mean, log_var):
            return torch.addcmul(mean, torch.rand_like(mean), (0.5 * log_var).exp())

    return Net(), *digits()


class Masked(LossOnly):
    """Predicts the pixels that it does not see."""

    def network(self):
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def hidden(self, x):
        return torch.rand_like(x) < 0.3

    def loss(self, x, y):
        x = x.flatten(1)
        hidden = self.hidden(x)
        return F.mse_loss(self(x.masked_fill(hidden, 0.0))[hidden], x[hidden])


@bug("noise-distribution")
def chance_is_that_of_normal_numbers():
    class Net(Masked):
        def hidden(self, x):
            return torch.randn_like(x) < 0.3

    return Net(), *digits()


class Wide(Speaker):
    """A language model of 96 dimensions, whose output is its embedding."""

    deviation = 0.02

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(12, 96), nn.Embedding(16, 96)
        self.body, self.net = nn.LayerNorm(96), nn.Linear(96, 12, bias=False)
        nn.init.normal_(self.embed.weight, std=self.deviation)
        self.net.weight = self.embed.weight

    def loss(self, x, y):
        return F.cross_entropy(self(x).transpose(1, 2), y)


@bug("initial-loss")
def tied_embedding_is_large():
    class Net(Wide):
        deviation = 1.0

    return Net(), *sentences()


@bug("clipped-too-early")
def gradients_are_clipped_in_the_training_step():
    class Net(Base):
        def training_step(self, batch, batch_idx):
            loss = self.loss(*batch)
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            return loss

    return Net(), *digits()


class Pairs(LossOnly):
    """Finds the noisy copy of each digit."""

    def network(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

    def vectors(self, x):
        return F.normalize(self(x), dim=1)

    def loss(self, x, y):
        one, other = self.vectors(x), self.vectors(x + 0.1 * torch.randn_like(x))
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(x)))


@bug("normalized-over-batch")
def vectors_are_normalized_over_the_batch():
    class Net(Pairs):
        def vectors(self, x):
            return F.normalize(self(x), dim=0)

    return Net(), *digits()


@bug("normalized-over-batch")
def vectors_are_divided_by_their_norm_over_the_batch():
    class Net(Pairs):
        def vectors(self, x):
            out = self(x)
            return out / out.norm(dim=0, keepdim=True)

    return Net(), *digits()


class Spread(Table):
    """Predicts a mean and the logarithm of a variance."""

    def network(self):
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))

    def loss(self, x, y):
        mean, log = self(x).unbind(1)
        return self.likelihood((y - mean) ** 2, log).mean()

    def likelihood(self, square, log):
        return 0.5 * (log + square / log.exp() + math.log(2 * math.pi))


@bug("deviation")
def logarithm_is_that_of_a_deviation_and_of_a_variance():
    class Net(Spread):
        def likelihood(self, square, log):
            return log + 0.5 * square / log.exp()

    return Net(), *diabetes()


@bug("deviation")
def deviation_has_half_its_logarithm():
    class Net(Spread):
        def likelihood(self, square, log):
            return 0.5 * log + 0.5 * square * (-2 * log).exp()

    return Net(), *diabetes()


def places():
    """Pictures of 4 x 4 cells, whether there is something in each, and where."""
    g = torch.Generator().manual_seed(0)
    objects = (torch.rand(640, 4, 4, generator=g) < 0.2).float()
    boxes = torch.rand(640, 2, 4, 4, generator=g) * objects[:, None]
    x = torch.cat([objects[:, None], boxes], 1) + 0.1 * torch.randn(640, 3, 4, 4, generator=g)
    return x, objects, boxes


class Detector(LossOnly):
    """Finds objects, and where they are."""

    def network(self):
        return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 1))

    def loss(self, x, objects, boxes):
        out = self(x)
        return F.binary_cross_entropy_with_logits(out[:, 0], objects) + self.error(out[:, 1:], boxes, objects)

    def error(self, out, boxes, objects):
        found = objects.bool()[:, None].expand_as(boxes)
        return F.mse_loss(out[found], boxes[found])


@bug("absent-targets")
def boxes_of_empty_places_are_trained():
    class Net(Detector):
        def error(self, out, boxes, objects):
            return F.mse_loss(out, boxes)

    return Net(), *halves(*places())


@bug("normalized-over-batch")
def two_views_are_normalized_over_the_batch():
    class Net(Pairs):
        def loss(self, x, y):
            views = torch.cat([self(x + 0.1 * torch.randn_like(x)) for _ in range(2)])
            z = F.normalize(views, dim=0)
            same = torch.arange(len(z)).roll(len(x))
            return F.cross_entropy((z @ z.T / 0.1).fill_diagonal_(float("-inf")), same)

    return Net(), *digits()


class Heads(Base):
    """Three labels of each sample, each with a head and a metric."""

    names = ("shape", "colour", "age")

    def __init__(self):
        super().__init__()
        self.rated = nn.ModuleDict({name: MulticlassAccuracy(4, average="micro") for name in self.names})

    def network(self):
        return nn.ModuleDict({name: nn.Linear(24, 4) for name in self.names})

    def forward(self, x):
        return {name: head(x) for name, head in self.net.items()}

    def trained(self):
        return self.names

    def training_step(self, batch, batch_idx):
        x, labels = batch
        out = self(x)
        return sum(F.cross_entropy(out[name], labels[:, i]) for i, name in enumerate(self.trained()))

    def validation_step(self, batch, batch_idx):
        x, labels = batch
        out = self(x)
        for i, name in enumerate(self.names):
            self.rated[name](out[name], labels[:, i])
            self.log(f"val/{name}_acc", self.rated[name])


def three_labels():
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (640, 3), generator=g)
    x = torch.cat([F.one_hot(labels, 4).flatten(1), torch.zeros(640, 12)], 1) + 0.3 * torch.randn(640, 24, generator=g)
    return x, labels


@bug("averaged-metric")
def labels_of_heads_are_in_another_order_in_validation():
    class Net(Heads):
        def trained(self):
            return sorted(self.names)

    return Net(), *halves(*three_labels())


class Scaled(Table):
    """Predicts a value in units of its deviation."""

    def __init__(self):
        super().__init__()
        self.error, self.square = MeanAbsoluteError(), MeanSquaredError()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)[:, 0]
        self.square(out, y)
        self.rate(out, y)
        self.log_dict({"val/mse": self.square, "val/mae": self.error})

    def rate(self, out, y):
        self.error(152 + 77 * out, 152 + 77 * y)


@bug("other-units")
def metric_compares_units_with_deviations():
    class Net(Scaled):
        def rate(self, out, y):
            self.error(152 + 77 * out, y)

    return Net(), *diabetes()


class Best(L.Callback):
    """Puts the weights of the best validation back."""

    best = None

    def on_validation_end(self, trainer, pl_module):
        value = float(trainer.callback_metrics["val/loss"])
        if self.best is None or value < self.best[0]:
            self.weights = self.kept(pl_module)
            self.best = value, trainer.global_step

    def kept(self, pl_module):
        return copy.deepcopy(pl_module.state_dict())

    def on_fit_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.weights)


class BestOfAll(Best):
    """The same, but its weights are those that change."""

    def on_validation_end(self, trainer, pl_module):
        value = float(trainer.callback_metrics["val/loss"])
        if self.best is None or value < self.best[0]:
            self.weights = dict(pl_module.state_dict())
            self.best = value, trainer.global_step


@bug("shared-state", callbacks=lambda: [BestOfAll()])
def best_weights_are_a_dictionary_of_those_that_change():
    return Base(), *digits()


@bug("loads-nothing")
def part_draws_the_weights_that_it_has_loaded_again():
    class Part(nn.Module):
        def __init__(self, weights):
            super().__init__()
            self.body, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
            if weights is not None:
                self.body.load_state_dict(weights)
            self.apply(self.init)

        @staticmethod
        def init(layer):
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.05)

        def forward(self, x):
            return self.head(self.body(x.flatten(1)).relu())

    class Net(Base):
        def network(self):
            return Part(nn.Linear(64, 32).state_dict())

    return Net(), *digits()
