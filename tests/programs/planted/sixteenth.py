"""Bugs of scales, policies and seeds."""

import copy
import math

import lightning as L
import numpy as np
import torch
from programs import (
    Base,
    LossOnly,
    bug,
    digits,
    halves,
    loaders,
)
from torch import nn
from torch.nn import functional as F


@bug("unscaled-input")
def pixels_are_normalized_as_bytes():
    class Net(Base):
        def loss(self, x, y):
            return F.cross_entropy(self((x - 127.5) / 127.5), y)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/loss", self.loss(x, y))

    return Net(), *digits()


@bug("deviation")
def noise_is_multiplied_by_the_logarithm():
    class Vae(LossOnly):
        def __init__(self):
            super().__init__()
            self.enc, self.dec = (
                nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)),
                nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64)),
            )

        def loss(self, x, y):
            mu, logvar = self.enc(x).chunk(2, 1)
            z = mu + torch.randn_like(mu) * logvar
            rec = F.mse_loss(self.dec(z), x.flatten(1), reduction="sum") / len(x)
            kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / len(x)
            return rec + 0.1 * kl

    return Vae(), *digits()


@bug("deviation")
def divergence_gets_the_deviation():
    class Vae(LossOnly):
        def __init__(self):
            super().__init__()
            self.enc, self.dec = (
                nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)),
                nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64)),
            )

        def loss(self, x, y):
            mu, logvar = self.enc(x).chunk(2, 1)
            std = torch.exp(0.5 * logvar)
            z = mu + torch.randn_like(mu) * std
            rec = F.mse_loss(self.dec(z), x.flatten(1), reduction="sum") / len(x)
            kl = -0.5 * torch.sum(1 + std - mu.pow(2) - std.exp()) / len(x)
            return rec + kl

    return Vae(), *digits()


@bug("unused-part")
def end_of_episode_is_inverted():
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.q = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))
            self.target = copy.deepcopy(self.q).requires_grad_(False)

        def training_step(self, batch, batch_idx):
            s, a, r, s2, done = batch
            value = self.q(s).gather(1, a[:, None])[:, 0]
            with torch.no_grad():
                next_value = self.target(s2).max(1).values
                target = r + 0.9 * done * next_value
            if batch_idx % 10 == 0:
                self.target.load_state_dict(self.q.state_dict())
            return F.smooth_l1_loss(value, target)

        def validation_step(self, batch, batch_idx):
            s, a, r, s2, done = batch  # noqa: RUF059
            self.log("val_q", self.q(s).max(1).values.mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.q.parameters(), lr=1e-3)

    g = torch.Generator().manual_seed(0)
    s = torch.randn(640, 6, generator=g)
    a = torch.randint(0, 4, (640,), generator=g)
    s2 = 0.8 * s + 0.3 * F.one_hot(a, 6) + 0.1 * torch.randn(640, 6, generator=g)
    return Net(), *halves(s, a, s2[:, 0].clone(), s2, (torch.rand(640, generator=g) < 0.1).float())


@bug("policy-sign")
def ratio_of_policies_is_inverted():
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))

        def training_step(self, batch, batch_idx):
            obs, action, advantage, old_logp = batch
            logp = torch.distributions.Categorical(logits=self.policy(obs)).log_prob(action)
            ratio = (old_logp - logp).exp()
            return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

        def validation_step(self, batch, batch_idx):
            obs, action, advantage, logp = batch  # noqa: RUF059
            self.log(
                "val_return", (torch.softmax(self.policy(obs), 1).gather(1, action[:, None])[:, 0] * advantage).mean()
            )

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=3e-3)

    g = torch.Generator().manual_seed(0)
    obs = torch.randn(640, 6, generator=g)
    action = torch.randint(0, 4, (640,), generator=g)
    adv = torch.where(action == obs[:, :4].argmax(1), 1.0, -0.3) + 0.1 * torch.randn(640, generator=g)
    return Net(), *halves(obs, action, adv, torch.full((640,), math.log(0.25)) + 0.1 * torch.randn(640, generator=g))


@bug("policy-sign")
def policy_without_minus():
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))

        def training_step(self, batch, batch_idx):
            obs, action, returns = batch
            logp = F.log_softmax(self.policy(obs), -1).gather(1, action[:, None])[:, 0]
            advantage = (returns - returns.mean()) / returns.std()
            return (logp * advantage).mean()

        def validation_step(self, batch, batch_idx):
            obs, action, advantage = batch
            self.log(
                "val_return", (torch.softmax(self.policy(obs), 1).gather(1, action[:, None])[:, 0] * advantage).mean()
            )

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=3e-3)

    g = torch.Generator().manual_seed(0)
    obs = torch.randn(640, 6, generator=g)
    action = torch.randint(0, 4, (640,), generator=g)
    adv = torch.where(action == obs[:, :4].argmax(1), 1.0, -0.3) + 0.1 * torch.randn(640, generator=g)
    return Net(), *halves(obs, action, adv)


@bug("policy-sign")
def distribution_of_a_policy_without_minus():
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))

        def training_step(self, batch, batch_idx):
            obs, action, returns = batch
            dist = torch.distributions.Categorical(logits=self.policy(obs))
            return (dist.log_prob(action) * returns).mean() - 0.01 * dist.entropy().mean()

        def validation_step(self, batch, batch_idx):
            obs, action, advantage = batch
            self.log(
                "val_return", (torch.softmax(self.policy(obs), 1).gather(1, action[:, None])[:, 0] * advantage).mean()
            )

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=3e-3)

    g = torch.Generator().manual_seed(0)
    obs = torch.randn(640, 6, generator=g)
    action = torch.randint(0, 4, (640,), generator=g)
    adv = torch.where(action == obs[:, :4].argmax(1), 1.0, -0.3) + 0.1 * torch.randn(640, generator=g)
    return Net(), *halves(obs, action, adv)


@bug("global-seed")
def numpy_is_seeded_in_getitem():
    class Noisy(torch.utils.data.Dataset):
        def __init__(self, x, y):
            self.x, self.y = x, y

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            np.random.seed(42)
            noise = np.random.normal(0, 0.2, self.x[i].shape).astype(np.float32)
            return self.x[i] + torch.from_numpy(noise), self.y[i]

    train, val = digits(loaded=False)
    return Base(), *loaders(Noisy(*train.tensors), val)
