"""The programs of ``planted/twentyfourth.py`` without their bugs, and what looks like them."""

import torch
from programs import Base, LossOnly, diabetes, digits, halves, no_bug
from programs.planted.twentyfourth import (
    Autoencoder,
    Averaged,
    Detector,
    Diffusion,
    Masked,
    Normalized,
    Pairs,
    Speaker,
    Spread,
    Tagger,
    Warm,
    Wide,
    places,
    sentences,
    tags,
)
from torch import nn
from torch.nn import functional as F


@no_bug()
def schedule_reads_the_module():
    return Warm(), *digits()


@no_bug()
def attention_drops_in_training_only():
    return Speaker(), *sentences()


@no_bug()
def rare_tags_weigh_more():
    x, y = tags()
    positive = y[:480].sum(0)
    return Tagger((480 - positive) / positive), *halves(x, y)


@no_bug()
def tags_weigh_alike():
    return Tagger(torch.full((8,), 0.5)), *halves(*tags())


@no_bug()
def average_is_copied_in_a_loop():
    return Averaged(), *digits()


@no_bug()
def name_of_a_loop_is_given_another_value_and_read():
    class Net(Base):
        def network(self):
            return nn.ModuleList([nn.Linear(64, 32), nn.Linear(32, 10)])

        def forward(self, x):
            x = x.flatten(1)
            for layer in self.net:
                x = layer(x.relu())
            return x

        def configure_optimizers(self):
            groups = []
            for rate in (1e-2, 1e-3):
                rate = rate / 2
                groups.append({"params": self.net[len(groups)].parameters(), "lr": rate})
            return torch.optim.Adam(groups)

    return Net(), *digits()


@no_bug()
def scales_of_norms_are_drawn_around_one():
    return Normalized(), *digits()


@no_bug()
def scales_of_norms_begin_at_zero():
    class Net(Normalized):
        def draw(self, layer):
            if isinstance(layer, nn.LayerNorm):
                nn.init.zeros_(layer.weight)
                nn.init.constant_(layer.bias, 0.1)

    return Net(), *digits()


@no_bug()
def noise_to_predict_is_normal():
    return Diffusion(), *diabetes()


@no_bug()
def noise_to_predict_is_uniform_around_zero():
    class Net(Diffusion):
        def noise(self, x):
            return 12**0.5 * (torch.rand_like(x) - 0.5)

    return Net(), *diabetes()


@no_bug()
def flow_begins_with_uniform_samples():
    class Net(Diffusion):
        def loss(self, x, y):
            t, begin = torch.rand(len(x), 1), torch.rand_like(x)
            return F.mse_loss(self(torch.cat([(1 - t) * begin + t * x, t], 1)), x - begin)

    return Net(), *diabetes()


@no_bug()
def deviation_is_multiplied_by_normal_noise():
    return Autoencoder(), *digits()


@no_bug()
def features_are_mixed_by_uniform_shares():
    class Net(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(32, 10)

        def training_step(self, batch, batch_idx):
            x, y = batch
            out = self.net(x)
            noised = out * (1 + 0.1 * (torch.rand_like(out) - 0.5))
            return F.cross_entropy(self.head(noised), y)

        def forward(self, x):
            return self.head(self.net(x))

    return Net(), *digits()


@no_bug()
def chance_is_that_of_uniform_numbers():
    return Masked(), *digits()


@no_bug()
def normal_numbers_are_compared_with_their_mean():
    class Net(Masked):
        def hidden(self, x):
            return torch.randn_like(x) < 0.0

    return Net(), *digits()


@no_bug()
def tied_embedding_is_small():
    return Wide(), *sentences()


@no_bug()
def gradients_are_clipped_before_the_step():
    class Net(Base):
        def on_before_optimizer_step(self, optimizer):
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    return Net(), *digits()


@no_bug()
def vectors_are_normalized():
    return Pairs(), *digits()


@no_bug()
def columns_of_both_views_are_compared():
    class Net(LossOnly):
        """Barlow Twins, whose columns are normalized over the batch."""

        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

        def loss(self, x, y):
            views = (self(x + 0.1 * torch.randn_like(x)) for _ in range(2))
            one, other = (F.normalize(z - z.mean(0), dim=0) for z in views)
            matrix = one.T @ other
            return ((matrix - torch.eye(32)) ** 2 * (0.01 + 0.99 * torch.eye(32))).sum()

    return Net(), *digits()


@no_bug()
def prototypes_are_normalized_over_their_first_dimension():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.classes = nn.Parameter(torch.randn(32, 10))

        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

        def forward(self, x):
            return 10 * F.normalize(self.net(x), dim=1) @ F.normalize(self.classes, dim=0)

    return Net(), *digits()


@no_bug()
def logarithm_is_that_of_a_variance():
    return Spread(), *diabetes()


@no_bug()
def logarithm_is_that_of_a_deviation():
    class Net(Spread):
        def likelihood(self, square, log):
            return log + 0.5 * square * (-2 * log).exp()

    return Net(), *diabetes()


@no_bug()
def error_is_weighed_by_what_is_learned():
    class Net(Spread):
        def likelihood(self, square, log):
            return (-log).exp() * square + log

    return Net(), *diabetes()


@no_bug()
def deviation_is_that_of_a_laplace_distribution():
    class Net(Spread):
        def likelihood(self, square, log):
            return square.clamp_min(1e-12).sqrt() / log.exp() + log

    return Net(), *diabetes()


@no_bug()
def boxes_of_places_with_something_are_trained():
    return Detector(), *halves(*places())


@no_bug()
def amounts_are_zero_where_nothing_is_bought():
    class Net(Detector):
        """Whether something is bought, and for how much, which is 0 otherwise."""

        def network(self):
            return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 2, 1))

        def error(self, out, boxes, objects):
            return F.mse_loss(out[:, 0], boxes[:, 0])

    return Net(), *halves(*places())
