"""The programs of ``planted/twentyfourth.py`` without their bugs, and what looks like them."""

import numpy as np
import torch
from programs import Base, LossOnly, Manual, diabetes, digits, halves, no_bug
from programs.planted.twentyfourth import (
    Autoencoder,
    Averaged,
    Best,
    Detector,
    Diffusion,
    Heads,
    Masked,
    Normalized,
    Pairs,
    Scaled,
    Speaker,
    Spread,
    Tagger,
    Warm,
    Wide,
    places,
    sentences,
    tags,
    three_labels,
)
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import BinaryAUROC, BinaryJaccardIndex


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


@no_bug()
def labels_of_heads_are_in_the_same_order():
    return Heads(), *halves(*three_labels())


@no_bug()
def metric_compares_units():
    return Scaled(), *diabetes()


@no_bug(callbacks=lambda: [Best()])
def best_weights_are_copied_whole():
    return Base(), *digits()


class Mixup:
    """Mixes samples by a generator of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, x, y):
        share, order = float(self.rng.beta(0.4, 0.4)), torch.randperm(len(x))
        return share * x + (1 - share) * x[order], y, y[order], share


@no_bug()
def samples_are_mixed_by_an_object_that_draws():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.mixup = Mixup()

        def training_step(self, batch, batch_idx):
            x, y, other, share = self.mixup(*batch)
            out = self(x)
            return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, other)

    return Net(), *digits()


@no_bug()
def gradients_of_many_batches_are_added_by_hand():
    class Net(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.manual_backward(self.loss(*batch) / 12)
            if (batch_idx + 1) % 12 == 0:
                optimizer.step()
                optimizer.zero_grad()

    return Net(), *digits(960, 320)


class Anomalies(Masked):
    """Its validation draws negatives for each batch, the same ones each time."""

    def __init__(self):
        super().__init__()
        self.area = BinaryAUROC()

    def validation_step(self, batch, batch_idx):
        x = batch[0].flatten(1)
        torch.manual_seed(batch_idx)
        scores = torch.cat([-(self(each) - each).square().mean(1) for each in (x, torch.rand_like(x))])
        self.area(scores.sigmoid(), torch.arange(2).repeat_interleave(len(x)))
        self.log("val/auroc", self.area)


@no_bug()
def negatives_are_drawn_for_each_batch_of_validation():
    class Net(Anomalies):
        def validation_step(self, batch, batch_idx):
            x = batch[0].flatten(1)
            noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(batch_idx))
            scores = torch.cat([-(self(each) - each).square().mean(1) for each in (x, noise)])
            self.area(scores.sigmoid(), torch.arange(2).repeat_interleave(len(x)))
            self.log("val/auroc", self.area)

    return Net(), *digits()


@no_bug()
def negatives_are_drawn_after_a_seed():
    return Anomalies(), *digits()


@no_bug()
def negatives_are_drawn_by_numpy():
    class Net(Anomalies):
        def validation_step(self, batch, batch_idx):
            x = batch[0].flatten(1)
            noise = torch.tensor(np.random.default_rng(batch_idx).random(x.shape), dtype=torch.float32)
            scores = torch.cat([-(self(each) - each).square().mean(1) for each in (x, noise)])
            self.area(scores.sigmoid(), torch.arange(2).repeat_interleave(len(x)))
            self.log("val/auroc", self.area)

    return Net(), *digits()


@no_bug()
def norm_adds_one_to_its_scales():
    class Norm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(0.02 * torch.randn(width))

        def forward(self, x):
            return F.rms_norm(x, x.shape[-1:]) * (1 + self.weight)

    class Net(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Norm(64), nn.ReLU(), nn.Linear(64, 10))

    return Net(), *digits()


@no_bug()
def gradients_of_many_batches_are_added_by_an_own_optimizer():
    class Net(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=False)
            self.manual_backward(self.loss(*batch) / 12)
            if (batch_idx + 1) % 12 == 0:
                optimizer.step()
                optimizer.zero_grad()

    return Net(), *digits(960, 320)


@no_bug()
def small_logits_are_rated_by_torchmetrics():
    class Net(LossOnly):
        """Finds the dark pixels, with first logits between 0 and 1."""

        def __init__(self):
            super().__init__()
            self.overlap = BinaryJaccardIndex()
            nn.init.constant_(self.net[1].bias, 0.5)
            nn.init.normal_(self.net[1].weight, std=0.001)

        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64))

        def loss(self, x, y):
            return F.binary_cross_entropy_with_logits(self(x), (x.flatten(1) < 0.3).float())

        def validation_step(self, batch, batch_idx):
            x, _ = batch
            self.overlap(self(x), (x.flatten(1) < 0.3).int())
            self.log("val/overlap", self.overlap)

    return Net(), *digits()
