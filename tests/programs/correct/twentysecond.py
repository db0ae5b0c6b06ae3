"""The programs of ``planted/twentyfirst.py`` without their bugs, and what looks like them."""

import copy

import lightning as L
import torch
from programs import Base, LossOnly, digits, halves, loaders, mlp, no_bug
from programs.planted.twentyfirst import Adversaries, Bayesian, Contrastive, Flow, Patches, Places, Spots, Views, moons
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.optim.lr_scheduler import MultiStepLR


@no_bug(max_epochs=6)
def milestones_of_a_longer_training():
    class Net(Base):
        def configure_optimizers(self):
            optimizer = Adam(self.parameters(), lr=1e-3)
            return [optimizer], [MultiStepLR(optimizer, [60, 80], 0.1)]

    return Net(), *digits(batch=16)


@no_bug(max_epochs=8)
def milestones_in_steps_are_called_per_step():
    class Net(Base):
        def configure_optimizers(self):
            optimizer = Adam(self.parameters(), lr=1e-2)
            schedule = MultiStepLR(optimizer, [80, 120], 0.1)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Net(), *digits(batch=32)


@no_bug()
def places_are_flipped_too():
    class Data(Spots):
        def flipped(self, x, at):
            at[0] = 1 - at[0]
            return x.flip(-1)

    return Places(), *loaders(Data(320, train=True), Data(160, train=False))


@no_bug()
def size_and_brightness_are_not_flipped():
    class Data(Spots):
        def flipped(self, x, at):
            return x.flip(-1)

        def __getitem__(self, i):
            x, _ = super().__getitem__(i)
            return x, torch.stack([x.mean(), x.std()])

    return Places(), *loaders(Data(320, train=True), Data(160, train=False))


@no_bug()
def divergence_is_divided_by_samples():
    return Bayesian(640), *digits()


@no_bug()
def scales_that_are_learned_beside_shifts():
    class Scale(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.shift, self.log_scale = nn.Parameter(torch.zeros(count)), nn.Parameter(torch.zeros(count))

        def forward(self, x):
            return (x - self.shift) * self.log_scale.exp()

    class Flow(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.ModuleList([Scale(64), nn.Linear(64, 64, bias=False), Scale(64)])

        def loss(self, x, y):
            first, mix, last = self.net
            z = last(mix(first(x.flatten(1))))
            volume = first.log_scale.sum() + last.log_scale.sum() + torch.slogdet(mix.weight).logabsdet
            penalty = 1e-3 * (first.shift.square().sum() + last.shift.square().sum())
            return 0.5 * z.square().sum(1).mean() - volume + penalty

    return Flow(), *digits()


@no_bug()
def losses_are_weighted_by_learned_variances():
    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 11))
            self.log_precisions = nn.Parameter(torch.tensor([0.1, -0.2, 0.3]))
            self.offsets = nn.Parameter(torch.tensor([0.1, 0.2, -0.3]))

        def loss(self, x, y):
            out = self.net(x)
            each = torch.stack(
                [
                    F.cross_entropy(out[:, :10], y),
                    F.mse_loss(out[:, 10], x.mean((1, 2, 3))),
                    F.binary_cross_entropy_with_logits(out[:, :10].logsumexp(1) + self.offsets.sum(), (y > 4).float()),
                ]
            )
            return (self.log_precisions.exp() * each - self.log_precisions).sum() + 0.01 * self.offsets.square().sum()

    return Net(), *digits()


@no_bug()
def channels_are_moved_behind_the_patches():
    return Patches(), *digits()


@no_bug()
def determinants_are_added():
    return Flow(), *moons()


@no_bug()
def generator_learns_against_the_critic():
    return Adversaries(), *moons()


@no_bug()
def critic_is_frozen_for_the_generator():
    class Net(Adversaries):
        def judged(self, fake):
            self.critic.requires_grad_(False)
            return fake

        def training_step(self, batch, batch_idx):
            self.critic.requires_grad_(True)
            super().training_step(batch, batch_idx)

    return Net(), *moons()


@no_bug()
def average_follows_ever_slower():
    class Average(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            self.kept = copy.deepcopy(pl_module.net).requires_grad_(False)

        @torch.no_grad()
        def on_train_batch_end(self, trainer, pl_module, *args):
            decay = min(0.99, (1 + trainer.global_step) / (10 + trainer.global_step))
            for slow, fast in zip(self.kept.parameters(), pl_module.net.parameters(), strict=True):
                slow.mul_(decay).add_(fast, alpha=1 - decay)

        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
            pl_module.log("val/slow", (self.kept(batch[0]).argmax(1) == batch[1]).float().mean())

    class Net(Base):
        def configure_callbacks(self):
            return [Average()]

    return Net(), *digits()


@no_bug()
def two_views_are_stacked():
    train, val = digits(loaded=False)
    return Contrastive(), *loaders(Views(train.tensors[0], 2), Views(val.tensors[0], 2))


@no_bug()
def forecasts_are_drawn_by_rejection():
    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.ModuleList([mlp(1, 16, 1), nn.Linear(1, 1)])

        def rate(self, x):
            return F.softplus(self.net[0](x)) + 1e-3

        def loss(self, x, y):
            return -torch.distributions.Gamma(self.rate(x), 1.0).log_prob(y).mean()

        def validation_step(self, batch, batch_idx):
            x, y = batch
            for _ in range(3):  # steps ahead
                x = torch.distributions.Gamma(self.rate(x), 1.0).sample()
            self.log("val/error", (self.net[1](x) * 0 + x - y).abs().mean())

    x = torch.rand(640, 1, generator=torch.Generator().manual_seed(0)) * 3
    return Net(), *halves(x, x + 0.5 * torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) + 0.1)


@no_bug()
def cosines_are_scaled_with_a_margin():
    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
            self.weight = nn.Parameter(torch.randn(10, 4))

        def loss(self, x, y):
            cosines = F.linear(F.normalize(self.net(x)), F.normalize(self.weight)).clamp(-1 + 1e-6, 1 - 1e-6)
            own = (cosines.acos() + 0.5).cos()
            return F.cross_entropy(40 * torch.where(F.one_hot(y, 10).bool(), own, cosines), y)

    return Net(), *digits()


@no_bug()
def pretrained_network_gets_other_classes():
    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.ModuleList([nn.Flatten(), nn.Linear(64, 10), nn.Linear(64, 4), nn.Linear(4, 10)])
            nn.init.normal_(self.net[1].weight, std=6)
            nn.init.zeros_(self.net[3].weight)
            self.net[1].requires_grad_(False)

        def loss(self, x, y):
            flatten, body, down, up = self.net
            return F.cross_entropy(body(flatten(x)) + up(down(flatten(x))), y)

    return Net(), *digits()


@no_bug()
def last_block_passes_nothing_on():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.back, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)

        def forward(self, x):
            h = self.mix(x).relu()
            return x - self.back(h), self.out(h)

    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.ModuleList([Block() for _ in range(3)])

        def loss(self, x, y):
            x, total = x.flatten(1), 0
            for block in self.net:
                x, out = block(x)
                total = total + out
            return F.cross_entropy(total, y)

    return Net(), *digits()
