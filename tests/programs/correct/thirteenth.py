"""Correct programs that are close to the bugs of ``planted/thirteenth.py``."""

import torch
from programs import Base, LossOnly, diabetes, digits, halves, loaders, mlp, no_bug, sequences
from programs.planted.thirteenth import (
    Averaged,
    Best,
    Clicks,
    Clipped,
    Collected,
    Denoiser,
    Focal,
    Gan,
    Metric,
    Mixed,
    Normalized,
    OfClicks,
    Rated,
    Scaled,
    Stateful,
    Tags,
    TwoParts,
    Uncertain,
    Words,
    points,
    progress,
    ratings,
    tagged,
    triplets,
    words,
)
from torch import nn
from torch.nn import functional as F


@no_bug()
def encoder_is_frozen():
    return TwoParts(), *digits()


@no_bug()
def frozen_encoder_says_so():
    class M(TwoParts):
        def freeze(self, encoder):
            encoder.requires_grad_(False)
            encoder.requires_grad = False

    return M(), *digits()


@no_bug()
def error_in_the_unit_of_the_targets():
    return Scaled(), *progress()


@no_bug()
def error_of_logarithms():
    class M(Scaled):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/rmsle", F.mse_loss(self(x)[:, 0], y.log()).sqrt())

    return M(), *progress()


@no_bug()
def noise_is_removed():
    return Denoiser(), *digits()


@no_bug()
def augmented_digits_are_encoded():
    class M(Denoiser):
        def corrupted(self, x):
            return x.flip(-1) if torch.rand(()) < 0.5 else x

        def target(self, x, noisy):
            return noisy

    return M(), *digits()


@no_bug()
def inputs_and_labels_are_mixed():
    return Mixed(), *digits()


@no_bug()
def inputs_and_soft_labels_are_mixed():
    class M(Mixed):
        def training_step(self, batch, batch_idx):
            x, y = batch
            share, order, y = float(torch.rand(())), torch.randperm(len(x)), F.one_hot(y, 10).float()
            return F.cross_entropy(self(share * x + (1 - share) * x[order]), share * y + (1 - share) * y[order])

    return M(), *digits()


@no_bug()
def a_little_of_another_sample_is_noise():
    class M(Base):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self(x + 0.1 * x[torch.randperm(len(x))]), y)

    return M(), *digits()


@no_bug()
def generator_and_discriminator_compete():
    return Gan(), *points()


@no_bug()
def generator_maximizes_the_loss_of_the_discriminator():
    class M(Gan):
        def score(self, points, label):
            score = super().score(points, 0.0 if label == "fooled" else label)
            return -score if label == "fooled" else score

        wanted = "fooled"

    return M(), *points()


@no_bug()
def generator_of_wasserstein():
    class M(Gan):
        def score(self, points, label):
            return self.judge(points).mean() * (1 - 2 * label)

    return M(), *points()


@no_bug()
def focal_loss():
    return Focal(), *digits()


@no_bug()
def samples_weigh_by_chance():
    class M(Base):
        def loss(self, x, y):
            return (torch.randn(len(x)) * F.cross_entropy(self(x), y, reduction="none")).mean() + F.cross_entropy(
                self(x), y
            )

    return M(), *digits()


@no_bug()
def triplets_in_order():
    return Metric(), *triplets()


@no_bug()
def triplets_of_both_orders():
    class M(Metric):
        def loss(self, anchor, positive, negative):
            anchor, positive, negative = self(anchor), self(positive), self(negative)
            one = self.margin(anchor, positive, negative)
            return one - 0.1 * self.margin(anchor, negative, positive)

        def margin(self, anchor, positive, negative):
            return F.triplet_margin_loss(anchor, positive, negative)

    return M(), *triplets()


@no_bug()
def mean_and_deviation_in_order():
    return Base(), *loaders(*(Normalized(part) for part in digits(loaded=False)))


@no_bug()
def mean_and_deviation_are_predicted():
    return Uncertain(), *diabetes()


@no_bug()
def what_is_named_sigma_is_a_variance():
    class M(Uncertain):
        def loss(self, x, y):
            mean, sigma = self.predicted(x)
            return F.gaussian_nll_loss(mean, y, sigma)

    return M(), *diabetes()


@no_bug()
def gradients_are_clipped():
    return Clipped(), *digits()


@no_bug()
def state_of_zeros():
    return Stateful(), *halves(*sequences())


@no_bug()
def state_is_drawn_in_training_only():
    class M(Stateful):
        def state(self, count):
            return torch.randn(1, count, 16) if self.training else super().state(count)

    return M(), *halves(*sequences())


@no_bug()
def several_labels():
    return Tags(), *tagged()


@no_bug()
def two_numbers_of_a_rating():
    return Rated(), *ratings()


@no_bug()
def accuracy_of_all_batches():
    return Collected(), *digits()


@no_bug()
def last_batch_is_kept_beside_the_metric():
    class M(Collected):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.last = batch[0]

        def on_validation_epoch_end(self):
            super().on_validation_epoch_end()
            self.picture = self.last[:1]

    return M(), *digits()


@no_bug()
def mean_over_tokens():
    return Words(), *words()


@no_bug()
def confident_samples_count():
    class M(LossOnly):
        def loss(self, x, y):
            out = self(x)
            each = F.cross_entropy(out, y, reduction="none")
            return (each * (out.detach().softmax(1).amax(1) > 0.1).float()).mean()

    return M(), *digits()


@no_bug()
def half_is_dropped():
    class M(Base):
        def network(self):
            return nn.Sequential(mlp(64, 64, 64), nn.Dropout(0.8), nn.Linear(64, 10))

    return M(), *digits()


@no_bug()
def best_weights_are_copied():
    return Best(), *digits()


@no_bug()
def average_beside_the_module():
    return Averaged(), *digits()


@no_bug()
def times_in_all_digits():
    return OfClicks(), *loaders(Clicks(), Clicks(160, seed=1))


@no_bug()
def unknown_users_have_number_zero():
    class M(Rated):
        def __init__(self):
            super().__init__()
            unknown = 0
            self.item = nn.Embedding(40, 8, padding_idx=unknown)

    return M(), *ratings()


@no_bug()
def norms_of_a_trained_network_stay():
    class M(Base):
        def network(self):
            net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
            for _ in range(20):
                net(torch.rand(64, 64))
            return net

        def on_train_epoch_start(self):
            self.net[2].eval()

    return M(), *digits()
