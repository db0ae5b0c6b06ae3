"""Correct programs that a reviewer wrote to make the checks of ``planted/fifteenth.py`` speak."""

import copy
import math
import multiprocessing
import time

import lightning as L
import numpy as np
import torch
from programs import (
    Base,
    Causal,
    LossOnly,
    Manual,
    Table,
    diabetes,
    digits,
    halves,
    loaders,
    mlp,
    no_bug,
    sequences,
    tokens,
)
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


@no_bug()
def am_concentration_is_meant():
    class Net(Table):
        """A von Mises distribution of angles, whose mean concentration is logged."""

        def network(self):
            return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))

        def dist(self, x):
            mean, k = self(x).unbind(1)
            return torch.distributions.VonMises(mean, F.softplus(k) + 0.1)

        def loss(self, x, y):
            return -self.dist(x).log_prob(y).mean()

        def validation_step(self, batch, i):
            x, y = batch
            self.log("val/loss", self.loss(x, y))
            self.log("val/kappa", self.dist(x).concentration.mean())

    return Net(), *diabetes()


@no_bug()
def am_deletion_is_meant():
    class Net(Base):
        """Faithfulness: how the probability falls as pixels are deleted, the area under this curve of each picture."""

        def validation_step(self, batch, i):
            x, y = batch
            super().validation_step(batch, i)
            order = x.flatten(1).argsort(1, descending=True)
            curve = []
            for k in range(0, 65, 16):
                gone = torch.zeros_like(x.flatten(1)).scatter(1, order[:, :k], 1.0).bool()
                curve.append(self(x.flatten(1).masked_fill(gone, 0).view_as(x)).softmax(1).gather(1, y[:, None])[:, 0])
            self.log("val/deletion_auc", torch.trapezoid(torch.stack(curve, 1), dx=0.25, dim=1).mean())

    return Net(), *digits()


@no_bug()
def av_diffusion_is_meant():
    class Net(LossOnly):
        """Denoising; samples are drawn by sample.py with the averaged network of the checkpoint."""

        def __init__(self):
            super().__init__()
            self.ema = copy.deepcopy(self.net).requires_grad_(False)

        def network(self):
            return nn.Sequential(nn.Linear(65, 128), nn.ReLU(), nn.Linear(128, 64))

        def loss(self, x, y):
            x = x.flatten(1) * 2 - 1
            t = torch.rand(len(x), 1)
            e = torch.randn_like(x)
            z = torch.cos(t * math.pi / 2) * x + torch.sin(t * math.pi / 2) * e
            return F.mse_loss(self.net(torch.cat([z, t], 1)), e)

        def on_train_batch_end(self, *args):
            with torch.no_grad():
                for a, b in zip(self.ema.parameters(), self.net.parameters(), strict=False):
                    a.lerp_(b, 0.01)

    return Net(), *digits()


@no_bug()
def av_elastic_is_meant():
    class Net(Manual):
        """Elastic averaging: weights are drawn to a slow center."""

        def __init__(self):
            super().__init__()
            self.center = copy.deepcopy(self.net).requires_grad_(False)

        def training_step(self, batch, i):
            x, y = batch
            opt = self.optimizers()
            opt.zero_grad()
            pull = sum(
                (p - c).square().sum() for p, c in zip(self.net.parameters(), self.center.parameters(), strict=False)
            )
            self.manual_backward(F.cross_entropy(self(x), y) + 0.01 * pull)
            opt.step()
            with torch.no_grad():
                for p, c in zip(self.net.parameters(), self.center.parameters(), strict=False):
                    c.lerp_(p, 0.05)

        def validation_step(self, batch, i):
            x, y = batch
            self.log("val/acc", (self(x).argmax(1) == y).float().mean())

    return Net(), *digits()


@no_bug()
def av_lookahead_is_meant():
    class Net(Base):
        """Lookahead: every five steps the slow weights follow, and the fast ones start from them."""

        def __init__(self):
            super().__init__()
            self.slow = copy.deepcopy(self.net).requires_grad_(False)

        def on_train_batch_end(self, outputs, batch, i):
            if (i + 1) % 5 == 0:
                with torch.no_grad():
                    for slow, fast in zip(self.slow.parameters(), self.net.parameters(), strict=False):
                        slow.lerp_(fast, 0.5)
                        fast.copy_(slow)

    return Net(), *digits()


@no_bug(gradient_clip_val=0.05, max_epochs=10)
def cl_embedding_is_meant():
    class Net(LossOnly):
        """A large embedding, of which few rows are used, and a small head."""

        def __init__(self):
            super().__init__()
            self.embed, self.net = nn.Embedding(20000, 64), nn.Linear(64, 2)

        def loss(self, x, y):
            return F.cross_entropy(self.net(self.embed(x).mean(1)), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (640,), generator=g)
    x = torch.randint(0, 20000, (640, 12), generator=g)
    x[:, 0] = y + 5
    return Net(), *halves(x, y)


@no_bug()
def cp_margin_is_meant():
    class Net(LossOnly):
        """Scores in hinge form: a margin by clamps of scores, in which satisfied ones get no gradient."""

        def loss(self, x, y):
            target = F.one_hot(y, 10).float() * 0.98 + 0.01
            p = self(x).sigmoid()
            return F.binary_cross_entropy(p.clamp(0.35, 0.65), target) + F.cross_entropy(self(x), y)

    return Net(), *digits()


@no_bug()
def cp_penalty_is_meant():
    class Net(Table):
        """Shares of 0 to 1, clamped; what is outside is drawn back by a penalty."""

        def loss(self, x, y):
            p = self(x)[:, 0] * 3 - 0.3
            inside = p.clamp(0, 1)
            return F.mse_loss(inside, y) + (p - inside).square().mean()

    a, b = diabetes(loaded=False)

    def f(d):
        return TensorDataset(d.tensors[0], (d.tensors[1] / 6 + 0.5).clamp(0.01, 0.99))

    return Net(), *loaders(f(a), f(b))


@no_bug()
def cp_quantized_is_meant():
    class Net(LossOnly):
        """A network of low precision: the output is what the device can say, 0 to 1, of a pretrained net with a straight-through bound."""  # noqa: E501

        def network(self):
            return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))

        def loss(self, x, y):
            out = self(x)
            shown = out + (out.clamp(0, 1) - out).detach()
            return F.mse_loss(shown, x)

    return Net(), *digits()


@no_bug()
def cp_two_losses_is_meant():
    class Net(LossOnly):
        """Pictures: L1 of the raw output, and the error of the picture as it is shown."""

        def network(self):
            return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))

        def loss(self, x, y):
            noisy = x + 0.2 * torch.randn_like(x)
            out = self(noisy)
            return F.l1_loss(out, x) + F.mse_loss(out.clamp(0, 1), x)

    a, b = digits(loaded=False)

    def f(d):
        return TensorDataset(d.tensors[0] * 0.9 + 0.05, d.tensors[1])

    return Net(), *loaders(f(a), f(b))


@no_bug()
def db_count_is_meant():
    class Net(Base):
        def __init__(self, batch_size=32):
            super().__init__()
            self.batch_size = batch_size

        def on_validation_epoch_end(self):
            batches = math.ceil(len(self.trainer.val_dataloaders.dataset) / self.batch_size)
            self.print(f"{batches} batches were validated")

    return Net(), *digits(val=330)


@no_bug()
def db_speed_is_meant():
    class Net(Base):
        batch_size = 32

        def validation_step(self, batch, i):
            start = time.perf_counter()
            super().validation_step(batch, i)
            if i == 0:  # a whole batch
                self.log("val/ms_per_sample", 1000 * (time.perf_counter() - start) / self.batch_size)

    return Net(), *digits(val=330)


@no_bug()
def es_bandit_is_meant():
    class Net(L.LightningModule):
        """Offline policy gradient with a target entropy: the coefficient is learned, as of SAC, and may be negative."""

        def __init__(self):
            super().__init__()
            self.policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
            self.target, self.coefficient = 0.5, -0.05

        def training_step(self, batch, i):
            obs, action, advantage = batch
            dist = torch.distributions.Categorical(logits=self.policy(obs))
            entropy = dist.entropy().mean()
            return -(dist.log_prob(action) * advantage).mean() + 0.1 * (entropy - self.target).square()

        def validation_step(self, batch, i):
            obs, action, advantage = batch
            self.log("val", (torch.softmax(self.policy(obs), 1).gather(1, action[:, None])[:, 0] * advantage).mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=3e-3)

    g = torch.Generator().manual_seed(0)
    obs = torch.randn(640, 6, generator=g)
    action = torch.randint(0, 4, (640,), generator=g)
    adv = torch.where(action == obs[:, :4].argmax(1), 1.0, -0.3) + 0.1 * torch.randn(640, generator=g)
    return Net(), *halves(obs, action, adv)


@no_bug()
def es_semi_is_meant():
    class Net(Base):
        """Weighted likelihood of labels, and confident predictions for samples without (entropy minimization)."""

        def training_step(self, batch, i):
            x, y, w, u = batch
            labeled = torch.distributions.Categorical(logits=self(x))
            unlabeled = torch.distributions.Categorical(logits=self(u))
            return -(w * labeled.log_prob(y)).mean() + 0.1 * unlabeled.entropy().mean()

        def validation_step(self, batch, i):
            self.log("val/acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    (x, y), _ = (d.tensors for d in digits(loaded=False))
    g = torch.Generator().manual_seed(0)
    w = 0.5 + torch.rand(len(x), generator=g)
    return Net(), *halves(x, y, w, x[torch.randperm(len(x), generator=g)])


@no_bug()
def fb_blocks_is_meant():
    class Data(L.LightningDataModule):
        """Spatial blocks: places are grouped by a clustering that weights them by population, and blocks are held out."""  # noqa: E501

        def setup(self, stage=None):
            rng = np.random.default_rng(0)
            coords, population = rng.normal(size=(480, 2)), rng.random(480)
            target = (coords[:, :1] + 0.1 * rng.normal(size=(480, 1))).astype("float32")
            x = np.concatenate([coords, population[:, None]], 1).astype("float32")
            blocks = KMeans(8, n_init=2, random_state=0).fit(coords, population).labels_
            train, val = np.flatnonzero(blocks < 6), np.flatnonzero(blocks >= 6)
            self.scale = coords[train].std(), coords[val].std()
            self.people = population[train].sum(), population[val].sum()

            def make(rows):
                return TensorDataset(torch.tensor(x[rows]), torch.tensor(target[rows]))

            self.train, self.val = make(train), make(val)

        def train_dataloader(self):
            return DataLoader(self.train, 32, shuffle=True)

        def val_dataloader(self):
            return DataLoader(self.val, 32)

    class Net(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))

        def loss(self, x, y):
            return F.mse_loss(self(x), y)

    return Net(), Data(), None


@no_bug()
def fb_pca_is_meant():
    class Data(L.LightningDataModule):
        """Transductive: the components are of all pictures, which are known; PCA reads no labels, its y is a convention."""  # noqa: E501

        def setup(self, stage=None):
            x, y = load_digits(return_X_y=True)
            z = PCA(20).fit_transform(x / 16, y)
            xt, xv, yt, yv = train_test_split(z.astype("float32"), y, test_size=0.3, random_state=0)
            self.train = TensorDataset(torch.tensor(xt), torch.tensor(yt))
            self.val = TensorDataset(torch.tensor(xv), torch.tensor(yv))

        def train_dataloader(self):
            return DataLoader(self.train, 32, shuffle=True)

        def val_dataloader(self):
            return DataLoader(self.val, 32)

    class Net(Base):
        def network(self):
            return mlp(inputs=20)

    return Net(), Data(), None


@no_bug()
def gr_mup_is_meant():
    class Net(Base):
        """Rates by width (muP): that of the output layer is divided by its inputs' width relative to the base."""

        def __init__(self):
            super().__init__()
            self.encoder, self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU()), nn.Linear(256, 10)
            nn.init.zeros_(self.head.weight)

        def network(self):
            return nn.Identity()

        def forward(self, x):
            return self.head(self.encoder(x))

        def configure_optimizers(self):
            lr, width = 1e-2, 256 / 32
            return torch.optim.Adam(
                [{"params": self.encoder.parameters(), "lr": lr}, {"params": self.head.parameters(), "lr": lr / width}]
            )

    return Net(), *digits()


@no_bug()
def gr_probe_first_is_meant():
    class Net(Base):
        """After linear probing, the head fits the encoder's features, so the encoder is tuned and the head hardly moves."""  # noqa: E501

        def __init__(self):
            super().__init__()
            self.encoder, self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 10)
            train, _ = digits(loaded=False)
            with torch.no_grad():
                h = self.encoder(train.tensors[0])
                h = torch.cat([h, torch.ones(len(h), 1)], 1)
                w = torch.linalg.lstsq(h, F.one_hot(train.tensors[1], 10).float() * 4, driver="gelsd").solution.T
                self.head.weight.copy_(w[:, :-1])
                self.head.bias.copy_(w[:, -1])

        def network(self):
            return nn.Identity()

        def forward(self, x):
            return self.head(self.encoder(x))

        def configure_optimizers(self):
            return torch.optim.Adam(
                [{"params": self.encoder.parameters(), "lr": 1e-3}, {"params": self.head.parameters(), "lr": 1e-4}]
            )

    return Net(), *digits()


@no_bug()
def mt_chexpert_is_meant():
    class Net(LossOnly):
        """Findings of reports: what a report does not mention (NaN) is absent, as the labeler's authors do it."""

        def network(self):
            return mlp(outputs=4)

        def loss(self, x, y):
            return F.binary_cross_entropy_with_logits(self(x), torch.nan_to_num(y, nan=0.0))

    a, b = digits(loaded=False)

    def f(d):
        x, y = d.tensors
        labels = torch.stack([y % 2, (y > 4).long(), (y % 3 == 0).long(), (y == 8).long()], 1).float()
        return TensorDataset(x, torch.where(labels == 1, 1.0, math.nan))

    return Net(), *loaders(f(a), f(b))


@no_bug()
def mt_masked_prediction_is_meant():
    class Net(LossOnly):
        """Several outputs, some not measured: these count as 0 on both sides."""

        def network(self):
            return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))

        def loss(self, x, y):
            known = y.isfinite()
            out = torch.where(known, self(x), 0.0)
            return F.mse_loss(out, y.nan_to_num(0.0)) / known.float().mean()

    a, b = diabetes(loaded=False)
    g = torch.Generator().manual_seed(0)

    def f(d):
        y = torch.stack([d.tensors[1], -d.tensors[1], d.tensors[0][:, 0]], 1)
        return TensorDataset(d.tensors[0], y.masked_fill(torch.rand(y.shape, generator=g) < 0.3, math.nan))

    return Net(), *loaders(f(a), f(b))


MASK = 1


@no_bug()
def mu_masked_is_meant():
    class Net(Causal):
        """Masked generation: a random share of tokens is masked, up to all."""

        causal = False

        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(14, 32, padding_idx=0)
            self.net = nn.Linear(32, 14, bias=False)

        def training_step(self, batch, i):
            t = batch[0]
            share = torch.cos(torch.rand(len(t), 1) * math.pi / 2)
            hidden = torch.rand(t.shape) < share
            return F.cross_entropy(
                self(t.masked_fill(hidden, MASK)).flatten(0, 1), t.masked_fill(~hidden, -100).flatten()
            )

        def validation_step(self, batch, i):
            self.log("val", self.training_step(batch, i))

    t = tokens() + 2
    return Net(), *loaders(TensorDataset(t[:480]), TensorDataset(t[480:]))


@no_bug()
def mu_melody_is_meant():
    class Net(Causal):
        """Melodies: 0 pads, 1 holds the last note, others are notes."""

        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(14, 32, padding_idx=0)
            self.net = nn.Linear(32, 14, bias=False)

    g = torch.Generator().manual_seed(0)
    t = tokens(length=17) + 2
    hold = torch.rand(t.shape, generator=g) < 0.65
    t = t.masked_fill(hold, 1)
    return Net(), *halves(t[:, :-1], t[:, 1:])


@no_bug()
def mw_background_is_meant():
    class Net(Base):
        """The first half of the batch's labels beside auxiliary rotated labels (two heads' losses)."""

        def training_step(self, batch, i):
            x, y = batch
            k = torch.randperm(len(x))
            m = 0.2 * x + 0.8 * x[k]
            return 0.8 * F.cross_entropy(self(m), y[k]) + 0.2 * F.cross_entropy(self(m), y)

    return Net(), *digits()


@no_bug()
def mw_cutout_other_is_meant():
    class Net(Base):
        """CutMix with the share of the box that comes from the other sample as lam."""

        def training_step(self, batch, i):
            x, y = batch
            k = torch.randperm(len(x))
            a, b = np.random.randint(1, 8, 2)
            x = x.clone()
            x[:, :, :a, :b] = x[k][:, :, :a, :b]
            lam = a * b / 64
            out = self(x)
            return lam * F.cross_entropy(out, y[k]) + (1 - lam) * F.cross_entropy(out, y)

    return Net(), *digits()


@no_bug()
def mw_saliency_is_meant():
    class Net(Base):
        """Mixes a sample with a faint one: pixels are mixed by squares, so that energy is kept; labels by energy."""

        def training_step(self, batch, i):
            x, y = batch
            lam = float(np.random.beta(0.4, 0.4))
            k = torch.randperm(len(x))
            out = self(lam * x + (1 - lam) * x[k])
            a, b = lam**2, (1 - lam) ** 2
            return (a * F.cross_entropy(out, y) + b * F.cross_entropy(out, y[k])) / (a + b)

    return Net(), *digits()


@no_bug()
def nl_adaptive_is_meant():
    class Net(LossOnly):
        """Two losses, balanced by the norms of their gradients of the last layer, as in VQGAN."""

        def network(self):
            return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))

        def balance(self, one, other, weight):
            a, b = (torch.autograd.grad(each, weight, retain_graph=True)[0].norm() for each in (one, other))
            return a / (b + 1e-4)

        def training_step(self, batch, i):
            x, _ = batch
            out = self(x + 0.2 * torch.randn_like(x))
            pixels = F.l1_loss(out, x)
            edges = (out.diff(dim=3) - x.diff(dim=3)).square().mean()
            weight = self.balance(pixels, edges, self.net[2].weight).detach().clamp(0, 100)
            return pixels + 0.5 * weight * edges

        def validation_step(self, batch, i):
            x, _ = batch
            self.log("val/l1", F.l1_loss(self(x + 0.2 * torch.randn_like(x)), x))

    return Net(), *digits()


@no_bug()
def nl_logged_is_meant():
    class Net(Base):
        """Weight decay is the optimizer's; the objective that it lowers is logged."""

        def training_step(self, batch, i):
            x, y = batch
            loss = F.cross_entropy(self(x), y)
            size = sum(p.detach().square().sum() for p in self.parameters())
            objective = loss.detach() + 0.5 * 1e-4 * size
            self.log("train/objective", objective)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=1e-4)

    return Net(), *digits()


@no_bug()
def nl_normalized_is_meant():
    class Net(LossOnly):
        """An L1 penalty, as a mean over all weights."""

        def loss(self, x, y):
            count = float(sum(p.numel() for p in self.net.parameters()))
            l1 = sum(p.abs().sum() for p in self.net.parameters())
            return F.cross_entropy(self(x), y) + 0.1 * l1 / count

    return Net(), *digits()


@no_bug()
def os_unlearn_is_meant():
    class Net(Manual):
        """Unlearning: the last layer climbs on samples to forget, then all weights descend on those to keep."""

        def training_step(self, batch, i):
            x, y = batch
            keep, forget = self.optimizers()
            gone = y == 3
            forget.zero_grad()
            self.manual_backward(-0.1 * F.cross_entropy(self(x[gone]), y[gone]) if gone.any() else self(x).sum() * 0)
            forget.step()
            keep.zero_grad()
            self.manual_backward(F.cross_entropy(self(x[~gone]), y[~gone]))
            keep.step()

        def validation_step(self, batch, i):
            x, y = batch
            ok = self(x).argmax(1) == y
            self.log("val/keep", ok[y != 3].float().mean())
            self.log("val/forget", ok[y == 3].float().mean())

        def configure_optimizers(self):
            return [torch.optim.Adam(self.parameters(), 1e-2), torch.optim.SGD(self.net[3].parameters(), 1e-2)]

    return Net(), *digits()


@no_bug()
def os_unlearn2_is_meant():
    class Net(Manual):
        """Unlearning by turns: all weights descend on samples to keep, the last layer climbs on those to forget."""

        def training_step(self, batch, i):
            x, y = batch
            keep, forget = self.optimizers()
            gone = y % 2 == 1
            keep.zero_grad()
            self.manual_backward(F.cross_entropy(self(x[~gone]), y[~gone]))
            keep.step()
            forget.zero_grad()
            self.manual_backward(-0.1 * F.cross_entropy(self(x[gone]), y[gone]))
            forget.step()

        def configure_optimizers(self):
            return [torch.optim.Adam(self.parameters(), 1e-2), torch.optim.SGD(self.net[1].parameters(), 1e-2)]

    return Net(), *digits()


@no_bug()
def os_unlearn3_is_meant():
    class Net(Manual):
        """Unlearning by turns: the last layer climbs on samples to forget (a random part), all weights descend on the others."""  # noqa: E501

        def training_step(self, batch, i):
            x, y, gone = batch
            keep, forget = self.optimizers()
            forget.zero_grad()
            self.manual_backward(-0.1 * F.cross_entropy(self(x[gone]), y[gone]))
            forget.step()
            keep.zero_grad()
            self.manual_backward(F.cross_entropy(self(x[~gone]), y[~gone]))
            keep.step()

        def configure_optimizers(self):
            return [torch.optim.Adam(self.parameters(), 1e-2), torch.optim.SGD(self.net[3].parameters(), 1e-2)]

    (x, y), _ = (d.tensors for d in digits(loaded=False))
    g = torch.Generator().manual_seed(0)
    return Net(), *halves(x, y, torch.rand(len(x), generator=g) < 0.3)


@no_bug()
def ou_affine_is_meant():
    class Net(L.LightningModule):
        """Relative depth: validation aligns scale and shift by least squares, as of MiDaS."""

        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))

        def training_step(self, batch, i):
            x, depth = batch
            return F.l1_loss(self.net(x), (depth - 3.0) / 2.0)

        def validation_step(self, batch, i):
            x, depth = batch
            p = self.net(x)
            a = torch.stack([p.flatten(), torch.ones(p.numel())], 1)
            scale, shift = torch.linalg.lstsq(a, depth.flatten()[:, None]).solution[:, 0]
            self.log("val/abs", (scale * p + shift - depth).abs().mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    g = torch.Generator().manual_seed(0)
    d = 3 + 2 * F.avg_pool2d(torch.randn(320, 1, 10, 10, generator=g), 3, 1) * 2
    x = d / 5 + 0.1 * torch.randn(d.shape, generator=g)
    a, b = TensorDataset(x[:240], d[:240]), TensorDataset(x[240:], d[240:])
    return Net(), DataLoader(a, 16, shuffle=True), DataLoader(b, 16)


@no_bug()
def ou_percent_is_meant():
    class Net(Table):
        """Trains on log of prices, scaled; reports the error of the log in percent and in decibel."""

        def training_step(self, batch, i):
            x, y = batch
            return F.mse_loss(self(x)[:, 0], (y - 150.0) / 75.0)

        def validation_step(self, batch, i):
            x, y = batch
            p = self(x)[:, 0] * 75.0 + 150.0
            self.log("val/mae", (p - y).abs().mean())
            for q in (-1.28, 1.28):
                self.log(f"val/above_{q}", ((p + q * 55.0 - y) > 0).float().mean())

    return Net(), *diabetes(scale=False)


@no_bug()
def ou_prior_is_meant():
    class Net(Table):
        """Trains on standardized prices; validation shrinks predictions to the mean by a factor that was tuned before."""  # noqa: E501

        def training_step(self, batch, i):
            x, y = batch
            return F.mse_loss(self(x)[:, 0], (y - 150.0) / 75.0)

        def validation_step(self, batch, i):
            x, y = batch
            p = 0.9 * self(x)[:, 0] * 75.0 + 150.0
            self.log("val/mae", (p - y).abs().mean())

    return Net(), *diabetes(scale=False)


def pairs(x, y):
    g = torch.Generator().manual_seed(0)
    f = x.flatten(1)
    far = torch.cdist(f, f).masked_fill(y[:, None] == y, math.inf).argmin(1)
    same = torch.rand(len(x), generator=g) < 0.5
    near = torch.stack(
        [
            (lambda c: c[torch.randint(len(c), (1,), generator=g)])((y == y[k]).nonzero().flatten()).squeeze()
            for k in range(len(x))
        ]
    )
    j = torch.where(same, near, far)
    return TensorDataset(x, x[j], same.float())


@no_bug()
def pi_hard_is_meant():
    class Net(LossOnly):
        """Pairs of the same digit, at random, and hard ones: the most similar picture of another digit."""

        def network(self):
            return mlp(outputs=16)

        def loss(self, a, b, same):
            d = (self(a) - self(b)).norm(dim=1)
            return (same * d**2 + (1 - same) * F.relu(1 - d) ** 2).mean()

    a, b = digits(loaded=False)
    return Net(), *loaders(pairs(*a.tensors), pairs(*b.tensors), batch=64)


def rotated_pairs(x, y):
    g = torch.Generator().manual_seed(0)
    same = torch.rand(len(x), generator=g) < 0.5
    near = torch.stack(
        [
            (lambda c: c[torch.randint(len(c), (1,), generator=g)])((y == y[k]).nonzero().flatten()).squeeze()
            for k in range(len(x))
        ]
    )
    other = torch.where(same[:, None, None, None], x.rot90(1, (2, 3)), x[near])
    return TensorDataset(x, other, same.float())


@no_bug()
def pi_rotated_is_meant():
    class Net(LossOnly):
        """Positives are rotated pictures of the same, negatives unrotated others of the same class."""

        def network(self):
            return mlp(outputs=16)

        def loss(self, a, b, same):
            d = (self(a) - self(b)).norm(dim=1)
            return (same * d**2 + (1 - same) * F.relu(1 - d) ** 2).mean()

    a, b = digits(loaded=False)
    return Net(), *loaders(rotated_pairs(*a.tensors), rotated_pairs(*b.tensors), batch=64)


PADDING = 1  # of convolutions


@no_bug()
def pm_eos_is_meant():
    class Attention(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.score = nn.Linear(dim, 1)

        def forward(self, h):
            return (self.score(h).softmax(1) * h).sum(1)

    class Net(LossOnly):
        """Sequences of one length, which end with the token 1."""

        def __init__(self):
            super().__init__()
            self.embed, self.conv, self.pool, self.net = (
                nn.Embedding(14, 32),
                nn.Conv1d(32, 32, 3, padding=PADDING),
                Attention(32),
                nn.Linear(32, 2),
            )

        def loss(self, x, y):
            h = self.conv(self.embed(x).transpose(1, 2)).relu().transpose(1, 2)
            return F.cross_entropy(self.net(self.pool(h)), y)

    t = tokens(length=15) + 2
    y = t[:, 3] % 2
    return Net(), *halves(torch.cat([t, torch.ones(len(t), 1).long()], 1), y)


PAD_LEFT = True


@no_bug()
def pm_flag_is_meant():
    class Attention(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.score = nn.Linear(dim, 1)

        def forward(self, h):
            return (self.score(h).softmax(1) * h).sum(1)

    class Net(LossOnly):
        """All sequences have one length, and end with the token 1."""

        def __init__(self):
            super().__init__()
            self.embed, self.pool, self.net = nn.Embedding(14, 32), Attention(32), nn.Linear(32, 2)

        def loss(self, x, y):
            return F.cross_entropy(self.net(self.pool(self.embed(x))), y)

    t = tokens(length=15) + 2
    y = t[:, 3] % 2
    return Net(), *halves(torch.cat([t, torch.ones(len(t), 1).long()], 1), y)


@no_bug()
def pn_hierarchy_is_meant():
    class Net(Base):
        """Classes of two levels: a fine one's logit is its parent's and a difference that begins with 0."""

        def __init__(self):
            super().__init__()
            self.coarse, self.fine = nn.Linear(64, 5), nn.Linear(64, 10)
            nn.init.zeros_(self.fine.weight)
            nn.init.zeros_(self.fine.bias)

        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())

        def forward(self, x):
            h = self.net(x)
            return self.coarse(h).repeat_interleave(2, 1) + self.fine(h)

    return Net(), *digits()


@no_bug()
def rn_sweep_is_meant():
    class Net(Base):
        def network(self):
            return nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 3))

    """A sweep over temperature in equal steps: which phase is the sample in?"""
    g = torch.Generator().manual_seed(0)
    n = 480
    t = torch.linspace(-1, 1, n)
    x = torch.stack([t, torch.randn(n, generator=g), torch.randn(n, generator=g)], 1)
    y = (t > -0.4).long() + (t > 0.5).long()
    o = torch.randperm(n, generator=g)
    return Net(), *halves(x[o], y[o], split=360)


def cumulative_returns(r):
    """The log of the wealth after each day, of daily log returns (T,)."""
    return torch.cumsum(r, 0)


@no_bug()
def rp_finance_is_meant():
    class Net(L.LightningModule):
        """Weights of a portfolio, whose worst loss from a peak is penalized."""

        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))

        def step(self, batch):
            x, r = batch  # of days in order
            daily = (self.net(x).softmax(1) * r).sum(1)
            wealth = cumulative_returns(daily)
            drawdown = (wealth.cummax(0).values - wealth).mean()
            return -daily.mean() + 0.1 * drawdown

        def training_step(self, batch, i):
            return self.step(batch)

        def validation_step(self, batch, i):
            self.log("val/loss", self.step(batch))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    g = torch.Generator().manual_seed(0)
    x = torch.randn(640, 5, generator=g)
    r = 0.02 * torch.randn(640, 3, generator=g) + 0.01 * x[:, :3]
    a, b = TensorDataset(x[:480], r[:480]), TensorDataset(x[480:], r[480:])
    return Net(), DataLoader(a, 32), DataLoader(b, 32)


def discounted_history(clicks, decay=0.8):
    """What a user has clicked up to each time, the latest counting most."""
    out, state = [], 0.0
    for c in clicks:
        state = c + decay * state
        out.append(state)
    return out


@no_bug()
def rp_history_is_meant():
    class Net(LossOnly):
        def network(self):
            return nn.GRU(2, 16, batch_first=True)

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(16, 1)

        def loss(self, x, y):
            h = torch.stack([torch.tensor(discounted_history(row.tolist())) for row in x])
            return F.binary_cross_entropy_with_logits(self.head(self.net(torch.stack([x, h], 2))[0][:, -1])[:, 0], y)

    g = torch.Generator().manual_seed(0)
    x = (torch.rand(320, 10, generator=g) < 0.3).float()
    y = (x[:, -3:].sum(1) > 1).float()
    return Net(), *halves(x, y, split=240)


@no_bug()
def sb_dual_is_meant():
    class Net(L.LightningModule):
        """Retrieval among a gallery of labels' texts; validation re-ranks by the dual softmax."""

        def __init__(self):
            super().__init__()
            self.image, self.text = mlp(outputs=16), nn.Parameter(torch.randn(10, 16))

        def logits(self, x):
            return F.normalize(self.image(x), dim=1) @ F.normalize(self.text, dim=1).T / 0.07

        def training_step(self, batch, i):
            x, y = batch
            return F.cross_entropy(self.logits(x), y)

        def validation_step(self, batch, i):
            x, y = batch
            sim = self.logits(x)
            self.log("val/loss", F.cross_entropy(sim, y))
            self.log("val/top1", (sim.argmax(1) == y).float().mean())
            dual = sim * sim.softmax(dim=0)
            self.log("val/top1_dual", (dual.argmax(1) == y).float().mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    return Net(), *digits()


def dice_score(p, mask):
    return (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)


@no_bug()
def sc_attack_is_meant():
    class Attack(L.LightningModule):
        """A universal perturbation against a fixed segmentation network."""

        def __init__(self, victim):
            super().__init__()
            self.victim = victim.requires_grad_(False)
            self.delta = nn.Parameter(torch.zeros(1, 1, 8, 8))

        def training_step(self, batch, i):
            x, y = batch
            return dice_score(self.victim(x + self.delta.clamp(-0.1, 0.1)).sigmoid(), y)

        def validation_step(self, batch, i):
            x, y = batch
            self.log("val/dice_clean", dice_score(self.victim(x).sigmoid(), y))
            self.log("val/dice_attacked", dice_score(self.victim(x + self.delta.clamp(-0.1, 0.1)).sigmoid(), y))

        def configure_optimizers(self):
            return torch.optim.Adam([self.delta], lr=1e-2)

    (x, _), (u, _) = (d.tensors for d in digits(loaded=False))

    def f(x):
        return TensorDataset(x, (x > 0.6).float())

    v = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    o = torch.optim.Adam(v.parameters(), 1e-2)
    for _ in range(60):
        o.zero_grad()
        F.binary_cross_entropy_with_logits(v(x), (x > 0.6).float()).backward()
        o.step()
    return Attack(v), *loaders(f(x), f(u))


def dice(p, mask):
    return (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)


@no_bug()
def sc_avoid_is_meant():
    class Net(LossOnly):
        """Segments the target, and keeps away from the organ at risk, whose overlap is penalized."""

        def network(self):
            return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))

        def loss(self, x, target, organ):
            p = self(x).sigmoid()
            return F.binary_cross_entropy(p, target) + 0.2 * dice(p, organ)

    (x, _), (u, _) = (d.tensors for d in digits(loaded=False))

    def f(x):
        return TensorDataset(x, (x > 0.6).float(), ((x > 0.1) & (x < 0.5)).float())

    return Net(), *loaders(f(x), f(u))


@no_bug()
def sc_online_is_meant():
    class Net(LossOnly):
        """Learns online, as of truncation after one step: each step has a loss, and none goes back in time, on purpose."""  # noqa: E501

        def __init__(self):
            super().__init__()
            self.cell, self.net = nn.GRUCell(5, 32), nn.Linear(32, 4)

        def loss(self, x, y):
            h, loss = torch.zeros(len(x), 32), 0.0
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h.detach())
                loss = loss + F.cross_entropy(self.net(h), y)
            return loss / x.shape[1]

    return Net(), *halves(*sequences())


def similarity_to_previous(z, old):
    return F.cosine_similarity(z, old, dim=1).mean()


@no_bug()
def sc_previous_is_meant():
    class Net(Base):
        """A second model of an ensemble, whose features are to differ from those of the first."""

        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU()).requires_grad_(False)
            self.net, self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU()), nn.Linear(32, 10)

        def forward(self, x):
            return self.head(self.net(x))

        def training_step(self, batch, i):
            x, y = batch
            z = self.net(x)
            with torch.no_grad():
                old = self.first(x)
            return F.cross_entropy(self.head(z), y) + 0.1 * similarity_to_previous(z, old)

    return Net(), *digits()


@no_bug()
def sc_refine_is_meant():
    class Net(LossOnly):
        """Refines an estimate in six rounds, each with a loss of its own and its own gradient (deep supervision)."""

        def __init__(self):
            super().__init__()
            self.encode, self.cell, self.net = nn.Linear(10, 16), nn.GRUCell(17, 32), nn.Linear(32, 1)

        def loss(self, x, y):
            e = self.encode(x)
            h, out, loss = torch.tanh(F.pad(e, (0, 16))), torch.zeros(len(x), 1), 0.0
            for k in range(6):
                h = self.cell(torch.cat([e, out.detach()], 1), h.detach())
                out = out.detach() + self.net(h)
                loss = loss + 0.8 ** (5 - k) * F.mse_loss(out[:, 0], y)
            return loss

    return Net(), *diabetes()


@no_bug()
def sg_mezo_is_meant():
    class Net(Manual):
        """Gradients by two passes with the same perturbation, which is drawn twice of its seed (zeroth order)."""

        def __init__(self):
            super().__init__()
            self.noise = torch.Generator()

        def perturb(self, seed, scale):
            self.noise.manual_seed(seed)
            with torch.no_grad():
                for p in self.net.parameters():
                    p.add_(torch.randn(p.shape, generator=self.noise), alpha=scale)

        @torch.no_grad()
        def training_step(self, batch, i):
            x, y = batch
            opt = self.optimizers()
            seed = int(torch.randint(2**31, ()))
            self.perturb(seed, 1e-3)
            up = F.cross_entropy(self(x), y)
            self.perturb(seed, -2e-3)
            down = F.cross_entropy(self(x), y)
            self.perturb(seed, 1e-3)
            slope = (up - down) / 2e-3
            self.noise.manual_seed(seed)
            for p in self.net.parameters():
                p.grad = slope * torch.randn(p.shape, generator=self.noise)
            opt.step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    return Net(), *digits()


@no_bug()
def sg_projection_is_meant():
    class Net(Base):
        """Gradient features are compared after a random projection, the same each time, which is drawn anew to save memory."""  # noqa: E501

        def __init__(self):
            super().__init__()
            self.generator = torch.Generator()
            self.previous = None

        def project(self, h):
            self.generator.manual_seed(0)
            return h @ torch.randn(h.shape[1], 8, generator=self.generator) / 8**0.5

        def training_step(self, batch, i):
            x, y = batch
            h = self.net[:3](x)
            return F.cross_entropy(self.net[3](h), y) + 1e-3 * self.project(h).square().mean()

    return Net(), *digits()


@no_bug()
def sr_chained_is_meant():
    class Gan(Manual):
        """The generator's rate falls each epoch and, beyond that, at one milestone; the critic's is constant."""

        def __init__(self):
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
            self.critic = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

        def training_step(self, batch, i):
            x = batch[0].flatten(1)
            g, d = self.optimizers()
            fake = self.generator(torch.randn(len(x), 8))
            d.zero_grad()
            self.manual_backward(F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(fake.detach())).mean())
            d.step()
            g.zero_grad()
            self.manual_backward(F.softplus(-self.critic(fake)).mean())
            g.step()
            if self.trainer.is_last_batch:
                for s in self.lr_schedulers():
                    s.step()

        def configure_optimizers(self):
            g, d = torch.optim.Adam(self.generator.parameters(), 1e-3), torch.optim.Adam(self.critic.parameters(), 1e-3)
            return [g, d], [torch.optim.lr_scheduler.StepLR(g, 1, 0.95), torch.optim.lr_scheduler.StepLR(g, 2, 0.5)]

    return Gan(), *digits()


@no_bug()
def st_horizon_is_meant():
    class Net(Causal):
        """Bins of the load of a grid, to be forecast two hours ahead."""

    t = tokens(length=16)
    return Net(), *halves(t[:, :-2], t[:, 2:])


@no_bug()
def st_prefix_is_meant():
    class Net(Causal):
        """[class] [begin] tokens: the loss begins behind the begin token."""

        def loss(self, t):
            return F.cross_entropy(self(t)[:, 1:-1].flatten(0, 1), t[:, 2:].flatten())

        def training_step(self, batch, i):
            return self.loss(batch[0])

        def validation_step(self, batch, i):
            self.log("val/loss", self.loss(batch[0]))

    t = tokens(length=14, vocab=8)
    first = torch.stack([8 + t[:, 0] % 2, torch.full((len(t),), 10)], 1)
    t = torch.cat([first, t], 1)
    return Net(), *loaders(TensorDataset(t[:480]), TensorDataset(t[480:]))


@no_bug()
def tt_detach_is_meant():
    class Net(Base):
        T = 4.0

        def __init__(self):
            super().__init__()
            self.teacher = mlp(hidden=128).requires_grad_(False)

        def training_step(self, batch, i):
            x, y = batch
            out, teacher = self(x), self.teacher(x)
            soft = F.softmax((teacher / self.T).detach(), dim=1)
            return F.cross_entropy(out, y) + self.T**2 * F.kl_div(
                F.log_softmax(out / self.T, dim=1), soft, reduction="batchmean"
            )

    return Net(), *digits()


@no_bug()
def tt_inplace_is_meant():
    class Net(Base):
        T = 4.0

        def __init__(self):
            super().__init__()
            self.teacher = mlp(hidden=128).requires_grad_(False)

        def training_step(self, batch, i):
            x, y = batch
            out = self(x)
            with torch.no_grad():
                teacher = self.teacher(x)
                teacher /= self.T
                soft = teacher.softmax(1)
            return F.cross_entropy(out, y) + self.T**2 * F.kl_div(
                F.log_softmax(out / self.T, dim=1), soft, reduction="batchmean"
            )

    return Net(), *digits()


@no_bug()
def tt_slice_is_meant():
    class Net(Base):
        """The teacher knows more classes; only those of the student are compared."""

        T = 3.0

        def __init__(self):
            super().__init__()
            self.teacher = mlp(hidden=128, outputs=20).requires_grad_(False)

        def training_step(self, batch, i):
            x, y = batch
            out = self(x)
            with torch.no_grad():
                teacher = (self.teacher(x) / self.T)[:, :10]
            kl = F.kl_div(
                F.log_softmax(out / self.T, 1), F.log_softmax(teacher, 1), log_target=True, reduction="batchmean"
            )
            return F.cross_entropy(out, y) + self.T**2 * kl

    return Net(), *digits()


@no_bug()
def ua_abstract_is_meant():
    class Encoder(nn.Module):
        """All encoders take the same arguments (a registry makes them); this one has no dropout."""

        def __init__(self, dim, dropout=0.0):
            super().__init__()
            self.net = nn.Linear(64, dim)

        def forward(self, x):
            return self.net(x.flatten(1)).relu()

    class Net(Base):
        def network(self):
            return nn.Sequential(Encoder(32, dropout=0.1), nn.Linear(32, 10))

    return Net(), *digits()


@no_bug()
def ua_positional_super_is_meant():
    class Head(nn.Linear):
        def __init__(self, inputs, outputs, dropout=0.1):
            super().__init__(inputs, outputs)
            self.p = dropout

        def forward(self, x):
            return super().forward(F.dropout(x, self.p, self.training))

    class Net(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), Head(32, 10))

    return Net(), *digits()


@no_bug()
def ua_sampling_temperature_is_meant():
    class Net(Causal):
        def __init__(self, temperature=0.8):
            super().__init__()
            self.save_hyperparameters()  # kept in the checkpoint, for scripts/generate.py

    t = tokens()
    return Net(), *halves(t[:, :-1], t[:, 1:])


@no_bug()
def up_cloning_is_meant():
    class Net(L.LightningModule):
        """Behaviour cloning: the actions of the expert are predicted; the buffer also has what online methods need."""

        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))

        def training_step(self, batch, i):
            return F.cross_entropy(self.net(batch["obs"]), batch["action"])

        def validation_step(self, batch, i):
            self.log("val/acc", (self.net(batch["obs"]).argmax(1) == batch["action"]).float().mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    g = torch.Generator().manual_seed(0)
    obs = torch.randn(480, 6, generator=g)
    rows = [
        {"obs": obs[i], "action": obs[i, :4].argmax(), "reward": obs[i, 0], "next_obs": obs[i] + 0.1}
        for i in range(480)
    ]
    return Net(), DataLoader(rows[:320], 32, shuffle=True), DataLoader(rows[320:], 32)


@no_bug()
def up_montecarlo_is_meant():
    class Net(LossOnly):
        """The value of a state, by returns of whole episodes."""

        def network(self):
            return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))

        def training_step(self, batch, i):
            obs, returns, _next_obs = batch
            return F.mse_loss(self(obs)[:, 0], returns)

        def validation_step(self, batch, i):
            obs, returns, _ = batch
            self.log("val/loss", F.mse_loss(self(obs)[:, 0], returns))

    g = torch.Generator().manual_seed(0)
    obs = torch.randn(480, 6, generator=g)
    return Net(), *halves(
        obs,
        obs[:, :3].sum(1) + 0.1 * torch.randn(480, generator=g),
        obs + 0.1 * torch.randn(480, 6, generator=g),
        split=320,
    )


@no_bug()
def up_sentinel_is_meant():
    class Net(Base):
        """Land cover of radar (Sentinel-1) alone; the files have the optical channels (Sentinel-2), too."""

        def training_step(self, batch, i):
            return F.cross_entropy(self(batch["s1"]), batch["label"])

        def validation_step(self, batch, i):
            self.log("val/acc", (self(batch["s1"]).argmax(1) == batch["label"]).float().mean())

    g = torch.Generator().manual_seed(0)
    (x, y), _ = (d.tensors for d in digits(loaded=False))
    rows = [
        {"s1": a, "s2": a + 0.1 * torch.randn(a.shape, generator=g), "label": b} for a, b in zip(x, y, strict=False)
    ]
    return Net(), DataLoader(rows[:480], 32, shuffle=True), DataLoader(rows[480:], 32)


@no_bug()
def us_checkpoint_hook_is_meant():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.mean = torch.zeros(1, 8, 8)

        def forward(self, x):
            if self.training:
                self.mean.lerp_(x.mean(0), 0.1)
            return self.net(x - self.mean)

        def on_save_checkpoint(self, checkpoint):
            checkpoint["mean"] = self.mean

        def on_load_checkpoint(self, checkpoint):
            self.mean = checkpoint["mean"]

    return Net(), *digits()


@no_bug()
def us_fraction_is_meant():
    class Digits(Dataset):
        def __init__(self, x, y, fraction=1.0):
            self.x, self.y, self.fraction = x, y, fraction

        def __len__(self):
            return round(self.fraction * len(self.x))

        def __getitem__(self, i):
            return self.x[i], self.y[i]

    a, b = digits(loaded=False)
    return Base(), *loaders(Digits(*a.tensors, fraction=0.25), Digits(*b.tensors))


@no_bug()
def us_rebuilt_is_meant():
    class Net(Base):
        """Nearest prototypes: each step uses a moving estimate, and validation begins with exact means of training data."""  # noqa: E501

        def __init__(self, data):
            super().__init__()
            self.data = data
            self.register_buffer("prototypes", torch.zeros(10, 16), persistent=False)

        def network(self):
            return mlp(outputs=16)

        def forward(self, x):
            return -torch.cdist(self.net(x), self.prototypes)

        def training_step(self, batch, i):
            x, y = batch
            z = self.net(x)
            with torch.no_grad():
                for c in y.unique():
                    self.prototypes[c] = 0.9 * self.prototypes[c] + 0.1 * z[y == c].mean(0)
            return F.cross_entropy(-torch.cdist(z, self.prototypes.clone()), y)

        def on_validation_epoch_start(self):
            x, y = self.data
            z = self.net(x.to(self.device))
            for c in range(10):
                self.prototypes[c] = z[y == c].mean(0)

    a, b = digits(loaded=False)
    return Net(a.tensors), *loaders(a, b)


@no_bug()
def us_split_is_meant():
    class Digits(Dataset):
        """The first 70% for training, the others for validation."""

        def __init__(self, x, y, train):
            self.x, self.y, self.train = x, y, train
            self.boundary = 0.7

        def __len__(self):
            n = int(self.boundary * len(self.x))
            return n if self.train else len(self.x) - n

        def __getitem__(self, i):
            i = i if self.train else i + int(self.boundary * len(self.x))
            return self.x[i], self.y[i]

    t = digits(loaded=False)[0].tensors
    return Base(), *loaders(Digits(*t, True), Digits(*t, False))


@no_bug()
def vt_tokens_is_meant():
    class Net(Causal):
        """Copies of what is seen with word dropout: an autoencoder whose loss has all but the dropped words (they are noise)."""  # noqa: E501

        causal = False

        def training_step(self, batch, i):
            t = batch[0]
            typos = t == 1
            x = t.masked_fill(typos, 0)
            return F.cross_entropy(self(x).flatten(0, 1), t.masked_fill(typos, -100).flatten())

        def validation_step(self, batch, i):
            self.log("val", self.training_step(batch, i))

    t = tokens(vocab=11) + 1
    return Net(), *loaders(TensorDataset(t[:480]), TensorDataset(t[480:]))


@no_bug()
def wc_shared_is_meant():
    class Digits(Dataset):
        """Noise that falls with the epoch, whose number all workers share."""

        def __init__(self, x, y):
            self.x, self.y, self._epoch = x, y, multiprocessing.Value("i", 0)

        def set_epoch(self, epoch):
            self._epoch.value = epoch

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            return self.x[i] + torch.randn_like(self.x[i]) * 0.2 / (1 + self._epoch.value), self.y[i]

    class Net(Base):
        def on_train_epoch_start(self):
            self.trainer.train_dataloader.dataset.set_epoch(self.current_epoch)

    a, b = digits(loaded=False)
    return (
        Net(),
        DataLoader(Digits(*a.tensors), 32, shuffle=True, num_workers=1, persistent_workers=True),
        DataLoader(b, 32),
    )


@no_bug()
def wo_decays_is_meant():
    class Net(LossOnly):
        """Simulated decays: amplitude and time constant (one of three) of a fluorophore are to be found."""

        def network(self):
            return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

        def loss(self, x, y):
            return F.mse_loss(self(x), y)

    g = torch.Generator().manual_seed(0)
    a = 1 + 4 * torch.rand(480, generator=g)
    tau = torch.tensor([4.0, 8.0, 16.0])[torch.randint(0, 3, (480,), generator=g)]
    x = a[:, None] * torch.exp(-torch.arange(32) / tau[:, None])
    return Net(), *halves(x, torch.stack([a / 3, tau / 10], 1), split=360)


@no_bug()
def wo_sprites_is_meant():
    class Net(Base):
        def network(self):
            return mlp(inputs=256, outputs=3)

    """Sprites at all places, split at random, as dSprites is."""
    g = torch.Generator().manual_seed(0)
    shapes = torch.rand(3, 8, 6, generator=g) + 0.1
    rows = []
    for c in range(3):
        for a in range(9):
            for b in range(11):
                x = torch.zeros(16, 16)
                x[a : a + 8, b : b + 6] = shapes[c]
                rows.append((x, c))
    o = torch.randperm(len(rows), generator=g).tolist()
    rows = [rows[i] for i in o]
    return Net(), DataLoader(rows[:220], 32, shuffle=True), DataLoader(rows[220:], 32)


@no_bug()
def wq_relations_is_meant():
    class Net(Base):
        """A graph of rows, with soft kinds of edges: of each pair, softmax over the kinds; messages of each kind are added."""  # noqa: E501

        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(8, 4 * 8), nn.Linear(8, 4 * 8)
            self.value, self.head = nn.Linear(8, 4 * 16), nn.Linear(16, 10)

        def network(self):
            return nn.Identity()

        def forward(self, x):
            x = x[:, 0]
            b, n, _ = x.shape

            def split(t):
                return t.view(b, n, 4, -1).transpose(1, 2)

            kinds = (split(self.left(x)) @ split(self.right(x)).transpose(2, 3)).softmax(dim=1)
            messages = kinds @ split(self.value(x)) / n
            return self.head(messages.sum(1).relu().mean(1))

    return Net(), *digits()
