"""The programs of ``planted/twentieth.py`` without their bugs."""

import copy

import lightning as L
import numpy as np
import torch
from programs import Base, LossOnly, Manual, Table, diabetes, digits, halves, loaders, mlp, no_bug
from sklearn.datasets import load_diabetes
from sklearn.metrics import f1_score
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset


@no_bug()
def overlap_is_a_term_without_minus_mended():
    class Seg(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))

        def training_step(self, batch, batch_idx):
            x, m = batch
            p = self.net(x).sigmoid()
            inter = (p * m).sum((1, 2, 3))
            dice = (2 * inter + 1) / (p.sum((1, 2, 3)) + m.sum((1, 2, 3)) + 1)
            return F.binary_cross_entropy(p, m) + (1 - dice.mean())

        def validation_step(self, batch, batch_idx):
            x, m = batch
            self.log("val_iou", ((self.net(x) > 0) & (m > 0.5)).sum() / ((self.net(x) > 0) | (m > 0.5)).sum())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    x = digits(loaded=False)[0].tensors[0]
    return Seg(), *halves(x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)), (x > 0.5).float())


@no_bug()
def entropy_of_logits_is_minimized_mended():
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))

        def training_step(self, batch, batch_idx):
            obs, action, adv = batch
            logits = self.policy(obs)
            logp = logits.log_softmax(-1)
            entropy = -(logp.exp() * logp).sum(-1).mean()
            chosen = logp[torch.arange(len(action)), action]
            return -(chosen * adv).mean() - 0.05 * entropy

        def validation_step(self, batch, batch_idx):
            obs, action, adv = batch
            self.log("val_return", (torch.softmax(self.policy(obs), 1).gather(1, action[:, None])[:, 0] * adv).mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=3e-3)

    g = torch.Generator().manual_seed(0)
    obs = torch.randn(640, 6, generator=g)
    action = torch.randint(0, 4, (640,), generator=g)
    adv = torch.where(action == obs[:, :4].argmax(1), 1.0, -0.3) + 0.1 * torch.randn(640, generator=g)
    return Net(), *halves(obs, action, adv)


@no_bug()
def averaged_model_is_never_evaluated_mended():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.avg = AveragedModel(self.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
            self.avg.requires_grad_(False)

        def on_train_batch_end(self, *args):
            self.avg.update_parameters(self.net)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/acc", (self.avg(x).argmax(1) == y).float().mean())

    return Net(), *digits()


@no_bug()
def accuracies_of_unequal_batches_mended():
    class Net(Base):
        def on_validation_epoch_start(self):
            self.accs, self.right, self.n = [], 0, 0

        def validation_step(self, batch, batch_idx):
            x, y = batch
            hit = self(x).argmax(1) == y
            self.accs.append(hit.float().mean().item())
            self.right += int(hit.sum())
            self.n += len(y)

        def on_validation_epoch_end(self):
            self.log("val_acc", self.right / self.n)

    train, val = digits(count=640, val=297, loaded=False)
    return Net(), DataLoader(train, 32, shuffle=True), DataLoader(val, 256)


@no_bug()
def f1_of_batches_in_a_list_mended():
    class Net(Base):
        def on_validation_epoch_start(self):
            self.f1s, self.ps, self.ts = [], [], []

        def validation_step(self, batch, batch_idx):
            x, y = batch
            p = self(x).argmax(1)
            self.f1s.append(f1_score(y.numpy(), p.numpy(), average="macro"))
            self.ps.append(p)
            self.ts.append(y)

        def on_validation_epoch_end(self):
            self.log("val_f1", float(f1_score(torch.cat(self.ts), torch.cat(self.ps), average="macro")))

    return Net(), *digits()


@no_bug()
def standardized_before_the_split_mended():
    class Data(L.LightningDataModule):
        def setup(self, stage=None):
            x, y = load_diabetes(return_X_y=True, scaled=False)
            rng = np.random.default_rng(0).permutation(len(x))
            x, y = x[rng], y[rng]
            mu, sd = x[:320].mean(0), x[:320].std(0)
            x = torch.tensor((x - mu) / sd, dtype=torch.float32)
            y = torch.tensor((y - 150) / 77, dtype=torch.float32)
            self.train, self.val = TensorDataset(x[:320], y[:320]), TensorDataset(x[320:], y[320:])

        def train_dataloader(self):
            return DataLoader(self.train, 32, shuffle=True)

        def val_dataloader(self):
            return DataLoader(self.val, 64)

    return Table(), Data(), None


@no_bug()
def logarithm_of_another_base_mended():
    class Net(Table):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.l1_loss(self(x)[:, 0], torch.log10(y))

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val_mae", (10 ** self(x)[:, 0] - y).abs().mean())

    (x, y), (u, v) = (d.tensors for d in diabetes(loaded=False, scale=False))
    return Net(), *loaders(TensorDataset(x, y), TensorDataset(u, v))


@no_bug()
def mean_is_divided_first_mended():
    class Net(Table):
        def __init__(self):
            super().__init__()
            self.mean, self.std = 152.0, 77.0

        def loss(self, x, y):
            return F.mse_loss(self(x)[:, 0], (y - self.mean) / self.std)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val_rmse", (self(x)[:, 0] * self.std + self.mean - y).square().mean().sqrt())

    (x, y), (u, v) = (d.tensors for d in diabetes(loaded=False, scale=False))
    return Net(), *loaders(TensorDataset(x, y), TensorDataset(u, v))


@no_bug()
def argmax_over_columns_mended():
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            x, m = batch
            p = self.net(x).argmax(1)
            self.log("val_acc", (p == m).float().mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    x = digits(loaded=False)[0].tensors[0]
    return Net(), *halves(x, (x[:, 0] * 2.99).long())


@no_bug()
def errors_are_never_emptied_mended():
    class Net(Table):
        def __init__(self):
            super().__init__()
            self.errors = []

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.errors += [(self(x)[:, 0] - y).abs()]

        def on_validation_epoch_end(self):
            self.log("val_mae", torch.cat(self.errors).mean())
            self.errors.clear()

    return Net(), *diabetes()


@no_bug()
def hits_over_batches_times_size_mended():
    class Net(Base):
        def on_validation_epoch_start(self):
            self.hits = self.seen_batches = self.n = 0

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.hits += int((self(x).argmax(1) == y).sum())
            self.seen_batches += 1
            self.n += len(y)

        def on_validation_epoch_end(self):
            self.log("val_acc", self.hits / self.n)

    train, val = digits(count=640, val=297, loaded=False)
    return Net(), DataLoader(train, 32, shuffle=True), DataLoader(val, 64)


@no_bug()
def error_is_scaled_back_with_the_mean_mended():
    class Net(Table):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.l1_loss(self(x)[:, 0], y)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            p = self(x)[:, 0]
            self.log("val_mae", ((p * 77.0 + 152.0) - (y * 77.0 + 152.0)).abs().mean())
            self.log("val_loss", F.l1_loss(p, y))

    return Net(), *diabetes()


@no_bug()
def column_of_logarithms_mended():
    class Net(Table):
        def loss(self, x, y):
            p = 150.0 * F.softplus(self(x))[:, 0]
            return (torch.log1p(p) - torch.log1p(y)).square().mean().sqrt()

    return Net(), *diabetes(scale=False)


@no_bug()
def column_of_errors_times_weights_mended():
    class Net(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))

        def loss(self, x, y, w):
            error = F.mse_loss(self(x), y[:, None], reduction="none")
            return (error[:, 0] * w).mean()

    (x, y), _ = (d.tensors for d in diabetes(loaded=False))
    return Net(), *halves(x, y, torch.rand(len(y), generator=torch.Generator().manual_seed(0)), split=240)


LEVELS = (0.1, 0.5, 0.9)


@no_bug()
def levels_of_the_file_are_reversed_mended():
    class Net(Table):
        def network(self):
            return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))

        def loss(self, x, y):
            total, q = 0.0, self(x)
            for k, level in enumerate(LEVELS):
                error = y - q[:, k]
                total = total + torch.maximum(level * error, (level - 1) * error).mean()
            return total / len(LEVELS)

    return Net(), *diabetes(scale=False)


@no_bug()
def target_follows_at_once_mended():
    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.online, self.head = mlp(outputs=16), nn.Linear(16, 16)
            self.target = copy.deepcopy(self.online).requires_grad_(False)

        def network(self):
            return None

        def loss(self, x, y):
            return F.mse_loss(self.head(self.online(x + 0.1 * torch.randn_like(x))), self.target(x))

        def on_train_batch_end(self, *args):
            with torch.no_grad():
                for old, new in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    old.copy_(0.99 * old + 0.01 * new)

    return Net(), *digits()


@no_bug()
def advantage_is_squared_by_hand_mended():
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = nn.Linear(6, 4), nn.Linear(6, 1)

        def training_step(self, batch, batch_idx):
            obs, action, returns = batch
            advantage = returns - self.critic(obs)[:, 0]
            logp = torch.distributions.Categorical(logits=self.actor(obs)).log_prob(action)
            return -(logp * advantage.detach()).mean() + 0.5 * advantage.pow(2).mean()

        def validation_step(self, batch, batch_idx):
            self.log("val_value", self.critic(batch[0]).mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=3e-3)

    g = torch.Generator().manual_seed(0)
    obs = torch.randn(640, 6, generator=g)
    action = torch.randint(0, 4, (640,), generator=g)
    return Net(), *halves(obs, action, torch.where(action == obs[:, :4].argmax(1), 1.0, -0.3))


@no_bug()
def noise_times_its_variance_mended():
    class Timed(nn.Module):
        def __init__(self):
            super().__init__()
            self.time, self.first, self.last = nn.Embedding(50, 64), nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x, t):
            return self.last(F.silu(self.first(x) + self.time(t)))

    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-3, 0.1, 50), 0))

        def network(self):
            return Timed()

        def loss(self, x, y):
            x = 2 * x.flatten(1) - 1
            t = torch.randint(0, 50, (len(x),))
            noise, kept = torch.randn_like(x), self.kept[t][:, None]
            return F.mse_loss(self.net(kept.sqrt() * x + (1 - kept).sqrt() * noise, t), noise)

    (x, y), (u, v) = (d.tensors for d in digits(loaded=False))
    return Net(), *loaders(TensorDataset(x.flatten(1), y), TensorDataset(u.flatten(1), v))


@no_bug()
def time_is_drawn_again_mended():
    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.time, self.first, self.last = nn.Embedding(50, 64), nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x, t):
            return self.last(F.silu(self.first(x) + self.time(t)))

    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-3, 0.1, 50), 0))

        def network(self):
            return Denoiser()

        def loss(self, x, y):
            t = torch.randint(0, 50, (len(x),))
            noise, kept = torch.randn_like(x), self.kept[t][:, None]
            noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
            return F.mse_loss(self.net(noisy, t), noise)

    (x, y), (u, v) = (d.tensors for d in digits(loaded=False))
    return Net(), *loaders(TensorDataset(x.flatten(1), y), TensorDataset(u.flatten(1), v))


@no_bug()
def probabilities_of_a_committee_mended():
    class Net(Base):
        def network(self):
            return nn.ModuleList([mlp(), mlp()])

        def forward(self, x):
            votes = [torch.softmax(part(x), 1) for part in self.net]
            return sum(votes) / len(votes)

        def loss(self, x, y):
            return F.nll_loss(self(x).clamp_min(1e-8).log(), y)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/acc", (self(x).argmax(1) == y).float().mean())

    return Net(), *digits()


def collate_collate_sorts_two(rows):
    tokens, static, y = zip(*rows, strict=True)
    order = sorted(range(len(rows)), key=lambda i: -len(tokens[i]))
    x = nn.utils.rnn.pad_sequence([tokens[i] for i in order], batch_first=True)
    static = torch.stack([static[i] for i in order])
    return x, torch.tensor([len(tokens[i]) for i in order]), static, torch.tensor([y[i] for i in order])


@no_bug()
def collate_sorts_two_of_three_parts_mended():
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 16, padding_idx=0), nn.Linear(35, 4)
            self.rnn = nn.GRU(16, 32, batch_first=True)

        def forward(self, x, n, static):
            _, h = self.rnn(nn.utils.rnn.pack_padded_sequence(self.embed(x), n, batch_first=True, enforce_sorted=False))
            return self.head(torch.cat([h[0], static], 1))

        def training_step(self, batch, batch_idx):
            *given, y = batch
            return F.cross_entropy(self(*given), y)

        def validation_step(self, batch, batch_idx):
            *given, y = batch
            self.log("val_acc", (self(*given).argmax(1) == y).float().mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=3e-3)

    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 15, (600,), generator=g).tolist()
    seqs = [torch.randint(1, 20, (n,), generator=g) for n in lengths]
    data = [(s, torch.randn(3, generator=g), int(s[-1]) % 4) for s in seqs]
    train = DataLoader(data[:480], 32, shuffle=True, collate_fn=collate_collate_sorts_two)
    return Net(), train, DataLoader(data[480:], 32, collate_fn=collate_collate_sorts_two)


@no_bug()
def risk_sets_of_earlier_times_mended():
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))

        def training_step(self, batch, batch_idx):
            x, time, event = batch
            score = self.net(x)[:, 0]
            at_risk = time[None, :] >= time[:, None]
            total = score[None, :].expand(len(score), -1).masked_fill(~at_risk, float("-inf")).logsumexp(1)
            return -((score - total) * event).sum() / event.sum()

        def validation_step(self, batch, batch_idx):
            self.log("val_score", self.net(batch[0]).mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=3e-3)

    g = torch.Generator().manual_seed(0)
    x = torch.randn(640, 6, generator=g)
    time = torch.distributions.Exponential(1.0).sample((640,)) * torch.exp(-x[:, 0])
    return Net(), *halves(x, time, (torch.rand(640, generator=g) < 0.6).float(), batch=64)


def collate_mean_over_padded(rows):
    x, tags = zip(*rows, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return pad(x, batch_first=True), pad(tags, batch_first=True), torch.tensor([len(t) for t in x])


@no_bug()
def mean_over_padded_tags_mended():
    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.head = nn.Embedding(20, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 4)

        def network(self):
            return None

        def loss(self, x, tags, lens):
            logits = self.head(self.rnn(self.embed(x))[0])
            per_token = F.cross_entropy(logits.transpose(1, 2), tags, reduction="none")
            real = torch.arange(x.shape[1])[None] < lens[:, None]
            return (per_token * real).sum() / real.sum()

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(*batch))

    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 15, (600,), generator=g).tolist()
    seqs = [torch.randint(1, 20, (n,), generator=g) for n in lengths]
    data = [(s, s % 4) for s in seqs]
    train = DataLoader(data[:480], 32, shuffle=True, collate_fn=collate_mean_over_padded)
    return Net(), train, DataLoader(data[480:], 32, collate_fn=collate_mean_over_padded)


@no_bug()
def thawed_by_a_callback_mended():
    class Thaw(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 2:
                for p in pl_module.body.parameters():
                    p.requires_grad_(True)
                trainer.optimizers[0].add_param_group({"params": [*pl_module.body.parameters()]})

    class Net(Base):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU()).requires_grad_(False)
            self.net = nn.Linear(64, 10)

        def forward(self, x):
            return self.net(self.body(x))

        def configure_callbacks(self):
            return [Thaw()]

        def configure_optimizers(self):
            return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    return Net(), *digits()


@no_bug()
def nodes_of_the_batch_are_unread_mended():
    class Net(L.LightningModule):
        def __init__(self, x, y):
            super().__init__()
            self.register_buffer("x", x)
            self.register_buffer("y", y)
            self.net = mlp()

        def training_step(self, nodes, batch_idx):
            out = self.net(self.x)
            return F.cross_entropy(out[nodes], self.y[nodes])

        def validation_step(self, nodes, batch_idx):
            self.log("val_acc", (self.net(self.x)[nodes].argmax(1) == self.y[nodes]).float().mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    x, y = digits(loaded=False)[0].tensors
    return Net(x, y), DataLoader(torch.arange(480), 32, shuffle=True), DataLoader(torch.arange(480, 640), 64)


@no_bug()
def graph_with_a_train_key_mended():
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

        def forward(self, g):
            return g["adj"] @ self.last(F.relu(g["adj"] @ self.first(g["x"])))

        def training_step(self, g, batch_idx):
            out = self(g)
            return F.cross_entropy(out[g["train"]], g["y"][g["train"]])

        def validation_step(self, g, batch_idx):
            self.log("val_acc", (self(g)[g["val"]].argmax(1) == g["y"][g["val"]]).float().mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (200,), generator=g)
    links = torch.rand(200, 200, generator=g) < 0.01 + 0.05 * (y[:, None] == y)
    adj = (links | links.T | torch.eye(200, dtype=torch.bool)).float()
    train = torch.rand(200, generator=g) < 0.5
    x = F.one_hot(y, 16) + torch.randn(200, 16, generator=g)
    graph = {"adj": adj / adj.sum(1, keepdim=True), "x": x, "y": y, "train": train, "val": ~train}
    return Net(), DataLoader([graph], batch_size=None), DataLoader([graph], batch_size=None)


@no_bug()
def shares_of_each_sample_are_exchanged_mended():
    class Net(Base):
        def training_step(self, batch, batch_idx):
            x, y = batch
            lam = torch.distributions.Beta(0.4, 0.4).sample((len(x),))
            order, w = torch.randperm(len(x)), lam.view(-1, 1, 1, 1)
            logits = self(w * x + (1 - w) * x[order])
            own, other = (F.cross_entropy(logits, t, reduction="none") for t in (y, y[order]))
            return torch.lerp(other, own, lam).mean()

    return Net(), *digits()


@no_bug()
def ratio_of_the_policy_to_itself_mended():
    class Net(Manual):
        def network(self):
            return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))

        @torch.no_grad()
        def rollout(self, s):
            dist = torch.distributions.Categorical(logits=self.net(s))
            a = dist.sample()
            return a, (a == s[:, :4].argmax(1)).float(), dist.log_prob(a)

        def training_step(self, batch, batch_idx):
            a, r, logp_old = self.rollout(batch[0])
            for _ in range(4):
                logp = torch.distributions.Categorical(logits=self.net(batch[0])).log_prob(a)
                ratio = (logp - logp_old).exp()
                gain = r - r.mean()
                self.optimizers().zero_grad()
                self.manual_backward(-torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean())
                self.optimizers().step()

    return Net(), *halves(torch.randn(640, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(640))


@no_bug()
def codes_without_straight_through_mended():
    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.enc, self.dec, self.codes = nn.Linear(64, 8), nn.Linear(8, 64), nn.Embedding(32, 8)

        def network(self):
            return None

        def loss(self, x, y):
            x = x.flatten(1)
            z = self.enc(x)
            with torch.no_grad():
                index = torch.cdist(z, self.codes.weight).argmin(1)
            e = self.codes(index)
            out = self.dec(z + (e - z).detach())
            return F.mse_loss(out, x) + F.mse_loss(e, z.detach()) + 0.25 * F.mse_loss(z, e.detach())

    return Net(), *digits()


@no_bug()
def weights_of_another_order_mended():
    class Net(Base):
        num_classes = 3

        def network(self):
            return mlp(outputs=3)

    (x, y), val = digits(loaded=False)[0].tensors, digits(loaded=False)[1]
    classes = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, 2])
    y, v = classes[y], classes[val.tensors[1]]
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
    weights = (1.0 / y.bincount())[y]
    sampler = torch.utils.data.WeightedRandomSampler(weights[order], len(y))
    train = TensorDataset(x[order], y[order])
    return Net(), DataLoader(train, 32, sampler=sampler), DataLoader(TensorDataset(val.tensors[0], v), 64)


@no_bug()
def rare_rows_are_copied_with_noise_mended():
    class Data(L.LightningDataModule):
        def setup(self, stage=None):
            rng = np.random.default_rng(0)
            x = rng.normal(size=(900, 16))
            y = (x[:, 0] + x[:, 1] + 0.5 * rng.normal(size=900) > 1.8).astype("int64")
            order = rng.permutation(900)

            def grown(x, y):
                rare = x[y == 1]
                more = [rare + 0.05 * rng.normal(size=rare.shape) for _ in range(5)]
                return np.concatenate([x, *more]), np.concatenate([y, np.ones(5 * len(rare), "int64")])

            (a, b), (u, v) = ((x[i], y[i]) for i in (order[300:], order[:300]))
            a, b = grown(a, b)
            splits = ((a, b), (u, v))
            self.train, self.val = (TensorDataset(torch.tensor(p).float(), torch.tensor(q)) for p, q in splits)

        def train_dataloader(self):
            return DataLoader(self.train, 64, shuffle=True)

        def val_dataloader(self):
            return DataLoader(self.val, 64)

    class Net(Base):
        def network(self):
            return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    return Net(), Data(), None


@no_bug()
def mean_of_the_logarithms_of_scales_mended():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_s, self.shift = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))

        def forward(self, x):
            return x * self.log_s.exp() + self.shift, self.log_s.sum().expand(len(x))

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.steps = nn.ModuleList([Scale(), Scale()])

        def loss(self, x):
            total = 0.0
            for step in self.steps:
                x, log_det = step(x)
                total = total + log_det
            return (0.5 * x.square().sum(1) - total).mean()

        def training_step(self, batch, batch_idx):
            return self.loss(batch[0])

        def validation_step(self, batch, batch_idx):
            self.log("val_nll", self.loss(batch[0]))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    x = torch.randn(640, 6, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 7) + 2
    return Net(), *halves(x, torch.zeros(640))


@no_bug()
def dropout_in_a_loop_of_layers_mended():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.net = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)])

        def forward(self, x):
            x = x.flatten(1)
            for i, layer in enumerate(self.net):
                x = layer(x)
                if i < 2:
                    x = F.dropout(F.relu(x), 0.3, self.training)
            return x

    return Net(), *digits()


@no_bug()
def noise_is_added_to_the_array_mended():
    class Waves(torch.utils.data.Dataset):
        def __init__(self, rows, seed):
            rng = np.random.default_rng(seed)
            self.clean = np.sin(np.arange(32) * rng.uniform(0.1, 0.5, (rows, 1))).astype("float32")
            self.rng = rng

        def __len__(self):
            return len(self.clean)

        def __getitem__(self, i):
            noisy, target = self.clean[i].copy(), torch.tensor(self.clean[i])
            noisy += 0.3 * self.rng.standard_normal(32, dtype="float32")
            return torch.tensor(noisy), target

    class Net(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))

        def loss(self, x, y):
            return F.mse_loss(self(x), y)

    return Net(), *loaders(Waves(320, 0), Waves(160, 1))


@no_bug()
def first_category_is_padding_mended():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList([nn.Embedding(n, 8) for n in (7, 4, 3)])
            self.net = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 2))

        def forward(self, x):
            return self.net(torch.cat([table(x[:, j]) for j, table in enumerate(self.tables)], 1))

    g = torch.Generator().manual_seed(0)
    x = torch.stack([torch.randint(0, n, (640,), generator=g) for n in (7, 4, 3)], 1)
    return Net(), *halves(x, (x[:, 0] + x[:, 1] > 4).long())


@no_bug()
def labels_of_crops_are_repeated_mended():
    class Net(Base):
        def training_step(self, batch, batch_idx):
            x, y = batch
            views = torch.stack([x + 0.1 * torch.randn_like(x) for _ in range(4)], 1).flatten(0, 1)
            return F.cross_entropy(self(views), y.repeat_interleave(4))

    return Net(), *digits(batch=25)


@no_bug()
def average_in_a_callback_follows_at_once_mended():
    class Average(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            self.kept = copy.deepcopy(pl_module.net).requires_grad_(False)

        @torch.no_grad()
        def on_train_batch_end(self, trainer, pl_module, *args):
            for slow, fast in zip(self.kept.parameters(), pl_module.net.parameters(), strict=True):
                slow.lerp_(fast, 0.01)

        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
            pl_module.log("val/slow", (self.kept(batch[0]).argmax(1) == batch[1]).float().mean())

    class Net(Base):
        def configure_callbacks(self):
            return [Average()]

    return Net(), *digits()


@no_bug()
def overlap_of_what_is_above_a_threshold_mended():
    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
            nn.init.constant_(self.net[2].bias, -2.0)  # few pixels are foreground

        def loss(self, x, m):
            p = self.net(x).sigmoid()
            q = p
            overlap = (2 * (q * m).sum((1, 2, 3)) + 1) / ((q + m).sum((1, 2, 3)) + 1)
            return F.binary_cross_entropy(p, m) + 1 - overlap.mean()

    x = digits(loaded=False)[0].tensors[0]
    return Net(), *halves(x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)), (x > 0.5).float())


@no_bug()
def labels_are_drawn_by_the_step():
    class Net(L.LightningModule):
        """Each step draws which of the labels of training it sees, and the loader only counts steps."""

        def __init__(self, x, y):
            super().__init__()
            self.register_buffer("x", x)
            self.register_buffer("y", y)
            self.net = mlp()

        def training_step(self, _, batch_idx):
            rows = torch.randperm(480)[:64]
            return F.cross_entropy(self.net(self.x[rows]), self.y[rows])

        def validation_step(self, nodes, batch_idx):
            self.log("val_acc", (self.net(self.x)[nodes].argmax(1) == self.y[nodes]).float().mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    x, y = digits(loaded=False)[0].tensors
    return Net(x, y), DataLoader(torch.arange(10), 1), DataLoader(torch.arange(480, 640), 64)
