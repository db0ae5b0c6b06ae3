"""Bugs that a reviewer looks for: signs, shifts, scales, rows and rates."""

import copy

import lightning as L
import numpy as np
import torch
from programs import (
    Base,
    Causal,
    LossOnly,
    Manual,
    Table,
    bug,
    diabetes,
    digits,
    halves,
    loaders,
    mlp,
    sequences,
    tokens,
)
from sklearn.datasets import load_iris
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


@bug("penalty-sign")
def entropy_of_the_policy_is_added_to_the_loss():
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))

        def training_step(self, batch, batch_idx):
            obs, action, advantage = batch
            dist = torch.distributions.Categorical(logits=self.policy(obs))
            policy_loss = -(dist.log_prob(action) * advantage).mean()
            entropy = dist.entropy().mean()
            self.log("entropy", entropy)
            return policy_loss + 0.05 * entropy

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


@bug("mixed-labels")
def weights_of_mixed_labels_are_exchanged():
    class Net(Base):
        def training_step(self, batch, batch_idx):
            x, y = batch
            lam = float(np.random.beta(0.4, 0.4))
            index = torch.randperm(len(x))
            out = self(lam * x + (1 - lam) * x[index])
            return (1 - lam) * F.cross_entropy(out, y) + lam * F.cross_entropy(out, y[index])

    return Net(), *digits()


@bug("average-unread")
def average_is_never_evaluated():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.ema = copy.deepcopy(self.net).requires_grad_(False)

        def on_train_batch_end(self, *args):
            with torch.no_grad():
                for a, b in zip(self.ema.parameters(), self.net.parameters(), strict=False):
                    a.lerp_(b, 0.02)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            out = self.net(x)
            self.log("val/acc", (out.argmax(1) == y).float().mean())

    return Net(), *digits()


@bug("averaged-metric")
def accuracy_is_divided_by_batches_of_equal_size():
    class Net(Base):
        batch_size = 32

        def on_validation_epoch_start(self):
            self.correct, self.batches, self.seen = 0, 0, 0

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.correct += (self(x).argmax(1) == y).sum().item()
            self.batches += 1
            self.seen += len(y)

        def on_validation_epoch_end(self):
            self.log("val/acc", self.correct / (self.batches * self.batch_size))

    return Net(), *digits(val=330)


@bug("unread-samples")
def length_is_that_of_batches():
    class Digits(torch.utils.data.Dataset):
        def __init__(self, x, y):
            self.x, self.y = x, y

        def __len__(self):
            return len(self.x) // 32

        def __getitem__(self, i):
            return self.x[i], self.y[i]

    train, val = digits(loaded=False)
    return Base(), *loaders(Digits(*train.tensors), Digits(*val.tensors), batch=8)


VOCAB = {
    w: i + 2 for i, w in enumerate(["alpha", "beta", "gamma", "delta", "good", "bad", "awful", "great", "fine", "poor"])
}


def encode(text):
    return [VOCAB.get(w, 1) for w in text.split()]


@bug("mostly-unknown")
def vocabulary_has_other_capitals():
    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(len(VOCAB) + 2, 16, padding_idx=0)
            self.net = nn.Linear(16, 2)

        def forward(self, x):
            return self.net(self.embed(x).mean(1))

    rng = np.random.default_rng(0)
    rows, labels = [], []
    for _ in range(640):
        label = rng.integers(2)
        words = list(rng.choice(["alpha", "beta", "gamma", "delta"], 5)) + list(
            rng.choice([["good", "great", "fine"], ["bad", "awful", "poor"]][label], 2)
        )
        rng.shuffle(words)
        text = " ".join(w.capitalize() if rng.random() < 0.85 else w for w in words)
        rows.append(encode(text))
        labels.append(label)
    return Net(), *halves(torch.tensor(rows), torch.tensor(labels))


def dice(p, y):
    return (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


@bug("loss-maximized")
def overlap_is_added_to_the_loss():
    class Net(LossOnly):
        def network(self):
            return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))

        def loss(self, x, y):
            out = self(x)
            return F.binary_cross_entropy_with_logits(out, y) + dice(out.sigmoid(), y)

    (x, _), (u, _) = (d.tensors for d in digits(loaded=False))
    x, u = x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)), u
    return Net(), *loaders(TensorDataset(x, (x > 0.6).float()), TensorDataset(u, (u > 0.6).float()))


@bug("schedule-repeated")
def second_schedule_has_the_first_optimizer():
    class Net(Manual):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(10, 10)

        def training_step(self, batch, batch_idx):
            x, y = batch
            a, b = self.optimizers()
            a.zero_grad()
            b.zero_grad()
            loss = F.cross_entropy(self.head(self(x)), y)
            self.manual_backward(loss)
            a.step()
            b.step()
            if self.trainer.is_last_batch:
                for s in self.lr_schedulers():
                    s.step()

        def configure_optimizers(self):
            body, head = (
                torch.optim.Adam(self.net.parameters(), lr=1e-2),
                torch.optim.Adam(self.head.parameters(), lr=1e-2),
            )
            s1 = torch.optim.lr_scheduler.StepLR(body, 1, 0.5)
            s2 = torch.optim.lr_scheduler.StepLR(body, 1, 0.5)
            return [body, head], [s1, s2]

    return Net(), *digits()


@bug("foreign-gradient")
def optimizer_of_the_generator_has_the_critic():
    class Gan(Manual):
        def __init__(self):
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
            self.critic = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

        def training_step(self, batch, batch_idx):
            x = batch[0].flatten(1)
            g, d = self.optimizers()
            fake = self.generator(torch.randn(len(x), 8))
            d.zero_grad()
            self.manual_backward(F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(fake.detach())).mean())
            d.step()
            g.zero_grad()
            self.manual_backward(F.softplus(-self.critic(fake)).mean())
            g.step()

        def configure_optimizers(self):
            return [torch.optim.Adam(self.parameters(), lr=1e-3), torch.optim.Adam(self.critic.parameters(), lr=1e-3)]

    return Gan(), *digits()


@bug("unsaved-state")
def statistics_are_not_persistent():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(1, 8, 8), persistent=False)

        def forward(self, x):
            if self.training:
                self.mean.lerp_(x.mean(0), 0.1)
            return self.net(x - self.mean)

    return Net(), *digits()


@bug("cut-gradient")
def state_is_detached_at_each_time():
    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.cell, self.net = nn.GRUCell(5, 32), nn.Linear(32, 4)

        def loss(self, x, y):
            h = torch.zeros(len(x), 32)
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h.detach())
            return F.cross_entropy(self.net(h), y)

    return Net(), *halves(*sequences())


@bug("visible-targets")
def pixels_that_are_not_masked_are_predicted():
    class Net(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))

        def loss(self, x, y):
            x = x.flatten(1)
            mask = torch.rand_like(x) < 0.6  # hidden
            out = self(x.masked_fill(mask, 0.0))
            error = (out - x) ** 2
            return (error * ~mask).sum() / mask.sum()

    return Net(), *digits()


@bug("visible-targets")
def tokens_that_are_not_masked_are_predicted():
    class Net(Causal):
        causal = False

        def training_step(self, batch, batch_idx):
            t = batch[0]
            masked = torch.rand(t.shape) < 0.2
            labels = t.masked_fill(masked, -100)
            return F.cross_entropy(self(t.masked_fill(masked, 0)).flatten(0, 1), labels.flatten(), ignore_index=-100)

        def validation_step(self, batch, batch_idx):
            self.log("val", self.training_step(batch, batch_idx))

    t = tokens(vocab=11) + 1
    a, b = TensorDataset(t[:480]), TensorDataset(t[480:])
    return Net(), *loaders(a, b)


@bug("shifted-twice")
def tokens_are_shifted_twice():
    class Net(Causal):
        def loss(self, x, y):
            logits = self(x)
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())

    t = tokens()
    return Net(), *halves(t[:, :-1], t[:, 1:])


def augment(x):
    return x + 0.2 * torch.randn_like(x)


def plain(x):
    return x


@bug("shared-augmentation")
def transform_of_a_shared_dataset():
    class Digits(torch.utils.data.Dataset):
        def __init__(self, x, y, transform=None):
            self.x, self.y, self.transform = x, y, transform

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            x = self.x[i]
            return (self.transform(x) if self.transform else x), self.y[i]

    class Data(L.LightningDataModule):
        def setup(self, stage=None):
            x, y = (torch.cat(t) for t in zip(*(d.tensors for d in digits(loaded=False)), strict=False))
            full = Digits(x, y)
            self.train, self.val = torch.utils.data.random_split(full, [640, 320], torch.Generator().manual_seed(0))
            self.train.dataset.transform = augment
            self.val.dataset.transform = plain

        def train_dataloader(self):
            return DataLoader(self.train, 32, shuffle=True)

        def val_dataloader(self):
            return DataLoader(self.val, 64)

    return Base(), Data(), None


@bug("pair-target")
def equal_pairs_are_driven_apart():
    class Net(LossOnly):
        def network(self):
            return mlp(outputs=16)

        def loss(self, a, b, same):
            d = (self(a) - self(b)).norm(dim=1)
            return ((1 - same) * d**2 + same * F.relu(1 - d) ** 2).mean()

    (x, y), (u, v) = (d.tensors for d in digits(loaded=False))

    def pairs(x, y):
        g = torch.Generator().manual_seed(0)
        i = torch.randperm(len(x), generator=g)
        j = torch.stack(
            [
                torch.nonzero(y == y[k])[torch.randint(0, int((y == y[k]).sum()), (1,), generator=g)].squeeze()
                if torch.rand(1, generator=g) < 0.5
                else torch.randint(0, len(x), (1,), generator=g).squeeze()
                for k in i
            ]
        )
        return TensorDataset(x[i], x[j], (y[i] == y[j]).float())

    return Net(), *loaders(pairs(x, y), pairs(u, v))


def discounted(rewards, gamma=0.9):
    out, total = [], 0.0
    for r in rewards:
        total = r + gamma * total
        out.append(total)
    return out


@bug("returns-of-past")
def returns_are_those_of_the_past():
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))

        def training_step(self, batch, batch_idx):
            obs, actions, rewards = batch
            returns = torch.stack([torch.tensor(discounted(r.tolist())) for r in rewards])
            returns = (returns - returns.mean()) / (returns.std() + 1e-6)
            logp = torch.distributions.Categorical(logits=self.policy(obs)).log_prob(actions)
            return -(logp * returns).mean()

        def validation_step(self, batch, batch_idx):
            obs, actions, rewards = batch  # noqa: RUF059
            self.log("val_reward", rewards.mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    g = torch.Generator().manual_seed(0)
    obs = torch.randn(320, 10, 4, generator=g)
    act = torch.randint(0, 2, (320, 10), generator=g)
    rew = ((obs[..., 0] > 0).long() == act).float()
    return Net(), *halves(obs, act, rew, split=256)


@bug("group-rates")
def rates_of_body_and_head_are_exchanged():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = mlp(outputs=32), nn.Linear(32, 10)
            del self.net

        def network(self):
            return None

        def forward(self, x):
            return self.head(F.relu(self.backbone(x)))

        def configure_optimizers(self):
            lr, backbone_lr = 1e-2, 1e-4
            return torch.optim.Adam(
                [
                    {"params": self.backbone.parameters(), "lr": lr},
                    {"params": self.head.parameters(), "lr": backbone_lr},
                ]
            )

    net = Net()
    net.backbone[1].weight.data.mul_(3)  # as of one that is trained
    return net, *digits()


@bug("teacher-temperature")
def teacher_has_no_temperature():
    class Net(Base):
        T = 4.0

        def __init__(self):
            super().__init__()
            self.teacher = mlp().requires_grad_(False)

        def training_step(self, batch, batch_idx):
            x, y = batch
            out = self(x)
            with torch.no_grad():
                soft = self.teacher(x)
            kd = F.kl_div(F.log_softmax(out / self.T, 1), F.softmax(soft, 1), reduction="batchmean") * self.T**2
            return F.cross_entropy(out, y) + 0.5 * kd

    torch.manual_seed(1)
    net, (train, val) = Net(), digits()
    opt = torch.optim.Adam(net.teacher.requires_grad_(True).parameters(), 1e-2)
    for _ in range(4):
        for x, y in train:
            F.cross_entropy(net.teacher(x), y).backward()
            opt.step()
            opt.zero_grad()
    net.teacher.requires_grad_(False).eval()
    return net, train, val


@bug("positive-is-negative")
def queue_has_the_positives():
    class Moco(LossOnly):
        def __init__(self):
            super().__init__()
            self.key = copy.deepcopy(self.net).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(128, 16), dim=1))
            self.at = 0

        def network(self):
            return mlp(outputs=16)

        def loss(self, x, y):
            q = F.normalize(self(x + 0.1 * torch.randn_like(x)), dim=1)
            with torch.no_grad():
                if self.training:
                    for a, b in zip(self.key.parameters(), self.net.parameters(), strict=False):
                        a.lerp_(b, 0.01)
                k = F.normalize(self.key(x + 0.1 * torch.randn_like(x)), dim=1)
            self.enqueue(k)
            pos, neg = (q * k).sum(1, keepdim=True), q @ self.queue.clone().T
            return F.cross_entropy(torch.cat([pos, neg], 1) / 0.2, torch.zeros(len(x), dtype=torch.long))

        def enqueue(self, k):
            n = len(k)
            index = (self.at + torch.arange(n)) % 128
            self.queue[index] = k
            self.at = (self.at + n) % 128

    return Moco(), *digits()


@bug("worker-copies")
def epoch_is_set_in_the_dataset_of_persistent_workers():
    class Digits(torch.utils.data.Dataset):
        def __init__(self, x, y):
            self.x, self.y, self.epoch = x, y, 0

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            noise = torch.randn(self.x[i].shape, generator=torch.Generator().manual_seed(self.epoch * 10000 + i))
            return self.x[i] + 0.3 * noise, self.y[i]

    class Net(Base):
        def on_train_epoch_start(self):
            self.trainer.train_dataloader.dataset.epoch = self.current_epoch

    train, val = digits(loaded=False)
    return (
        Net(),
        DataLoader(Digits(*train.tensors), 32, shuffle=True, num_workers=1, persistent_workers=True),
        DataLoader(val, 64),
    )


@bug("constant-term")
def penalty_is_a_sum_of_numbers():
    class Net(LossOnly):
        def loss(self, x, y):
            l1 = sum(p.abs().sum().item() for p in self.net.parameters())
            return F.cross_entropy(self(x), y) + 1e-4 * l1

    return Net(), *digits()


@bug("weights-of-queries")
def softmax_over_the_heads():
    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.inp, self.qkv, self.net = nn.Linear(5, 32), nn.Linear(32, 96), nn.Linear(32, 4)

        def forward(self, x):
            n, t, _ = x.shape
            h = self.inp(x) + torch.linspace(-1, 1, t)[:, None]
            q, k, v = (a.view(n, t, 4, 8).transpose(1, 2) for a in self.qkv(h).chunk(3, -1))
            w = (q @ k.transpose(-2, -1) / 8**0.5).softmax(dim=1)
            return self.net((w @ v).transpose(1, 2).reshape(n, t, 32).mean(1))

    return Net(), *halves(*sequences())


@bug("row-number")
def number_of_the_row_is_a_column():
    class Net(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3))

    iris = load_iris(as_frame=True).frame.rename(columns=lambda c: c.split(" (")[0])
    frame = iris.reset_index()
    columns = [c for c in frame if c not in ("target",)]
    x, y = torch.tensor(frame[columns].to_numpy(np.float32)), torch.tensor(frame.target.to_numpy())
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return Net(), *halves(x[order], y[order], split=110)


@bug("other-units")
def predictions_are_scaled_back_without_the_mean():
    class Net(Table):
        def __init__(self, mean, std):
            super().__init__()
            self.mean, self.std = mean, std

        def loss(self, x, y):
            return F.mse_loss(self(x)[:, 0], (y - self.mean) / self.std)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/mae", (self(x)[:, 0] * self.std - y).abs().mean())

    train, val = diabetes(loaded=False, scale=False)
    y = train.tensors[1]
    return Net(float(y.mean()), float(y.std())), *loaders(train, val)


@bug("barely-trained", gradient_clip_val=1e-3)
def gradients_are_clipped_to_a_thousandth():
    class Net(Base):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Net(), *digits()


@bug("unused-part")
def next_state_is_not_read():
    class Net(L.LightningModule):
        gamma = 0.9

        def __init__(self):
            super().__init__()
            self.q = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))
            self.target = copy.deepcopy(self.q).requires_grad_(False)

        def training_step(self, batch, batch_idx):
            s, a, r, s2, done = batch  # noqa: RUF059
            value = self.q(s).gather(1, a[:, None])[:, 0]
            with torch.no_grad():
                next_value = self.target(s).max(1).values
            if batch_idx % 10 == 0:
                self.target.load_state_dict(self.q.state_dict())
            return F.smooth_l1_loss(value, r + self.gamma * (1 - done) * next_value)

        def validation_step(self, batch, batch_idx):
            s, a, r, s2, done = batch  # noqa: RUF059
            self.log("val_q", self.q(s).max(1).values.mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    g = torch.Generator().manual_seed(0)
    s = torch.randn(640, 6, generator=g)
    a = torch.randint(0, 4, (640,), generator=g)
    s2 = 0.8 * s + 0.3 * F.one_hot(a, 6) + 0.1 * torch.randn(640, 6, generator=g)
    return Net(), *halves(s, a, s2[:, 0].clone(), s2, (torch.rand(640, generator=g) < 0.1).float())
