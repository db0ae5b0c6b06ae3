"""Correct programs."""

import copy

import torch
from programs import (
    Base,
    LossOnly,
    Manual,
    Table,
    diabetes,
    digits,
    halves,
    loaders,
    mlp,
    no_bug,
    segments,
    sequences,
    tokens,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics import Accuracy, MeanSquaredError


@no_bug()
def token_autoencoder():
    """A bottleneck reconstructs its own tokens."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.embed, self.net, self.out = nn.Embedding(12, 8), nn.Linear(8 * 8, 16), nn.Linear(16, 8 * 12)

        def loss(self, x):
            out = self.out(self.net(self.embed(x).flatten(1)).relu()).view(-1, 8, 12)
            return F.cross_entropy(out.transpose(1, 2), x)

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    t = tokens(8)
    return M(), *halves(t)


@no_bug()
def conditional_vae():
    """The class is an input of encoder and decoder, the target is the picture."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.encoder, self.decoder = None, nn.Linear(74, 8), nn.Linear(14, 64)

        def loss(self, x, y):
            x, y = x.flatten(1), F.one_hot(y, 10).float()
            mean, log_var = self.encoder(torch.cat([x, y], 1)).chunk(2, 1)
            out = self.decoder(torch.cat([mean + torch.randn_like(mean) * (log_var / 2).exp(), y], 1))
            return (
                F.binary_cross_entropy_with_logits(out, x, reduction="sum") / len(x)
                + (mean.square() + log_var.exp() - log_var - 1).sum(1).mean() / 2
            )

    return M(), *digits()


@no_bug()
def siamese():
    """Pairs of samples that follow each other in the batch."""

    class M(LossOnly):
        def network(self):
            return mlp(outputs=8)

        def loss(self, x, y):
            a, b = self(x).view(-1, 2, 8).unbind(1)
            same = (y[::2] == y[1::2]).float()
            d = (a - b).norm(dim=1)
            return (same * d.square() + (1 - same) * F.relu(1 - d).square()).mean()

    return M(), *digits()


@no_bug()
def dino():
    """A teacher's centered softmax of other views is the target."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = mlp(outputs=16)
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)
            self.register_buffer("center", torch.zeros(16))

        def loss(self, x, y):
            views = [x + torch.randn_like(x) * 0.2 for _ in range(2)]
            with torch.no_grad():
                targets = [((self.teacher(v) - self.center) / 0.04).softmax(1) for v in views]
                if self.training:
                    self.center.lerp_(torch.cat([self.teacher(v) for v in views]).mean(0), 0.1)
                    for s, t in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                        t.lerp_(s, 0.01)
            return sum(F.cross_entropy(self.net(views[i]) / 0.1, targets[1 - i]) for i in range(2)) / 2

    return M(), *digits()


@no_bug()
def ddpg():
    """An actor's loss goes through the critic; targets move slowly; three optimizers' worth of networks."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.net = None
            self.actor, self.critic = (
                nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1), nn.Tanh()),
                nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)),
            )
            self.slow_actor, self.slow_critic = copy.deepcopy(self.actor), copy.deepcopy(self.critic)

        def training_step(self, batch, batch_idx):
            s, a, r, n = batch
            opt_a, opt_c = self.optimizers()
            with torch.no_grad():
                goal = r[:, None] + 0.9 * self.slow_critic(torch.cat([n, self.slow_actor(n)], 1))
            opt_c.zero_grad()
            self.manual_backward(F.mse_loss(self.critic(torch.cat([s, a], 1)), goal))
            opt_c.step()
            if batch_idx % 2:
                opt_a.zero_grad()
                self.manual_backward(-self.critic(torch.cat([s, self.actor(s)], 1)).mean())
                opt_a.step()
                with torch.no_grad():
                    for fast, slow in ((self.actor, self.slow_actor), (self.critic, self.slow_critic)):
                        for p, q in zip(fast.parameters(), slow.parameters(), strict=True):
                            q.lerp_(p, 0.05)

        def configure_optimizers(self):
            return torch.optim.Adam(self.actor.parameters(), 1e-3), torch.optim.Adam(self.critic.parameters(), 1e-3)

    s = torch.randn(640, 4)
    return M(), *loaders(
        TensorDataset(s, torch.rand(640, 1) * 2 - 1, s[:, 0], torch.randn(640, 4)),
        TensorDataset(s[:32], s[:32, :1], s[:32, 0], s[:32]),
    )


@no_bug()
def cyclegan():
    """One optimizer for two generators, one for two discriminators."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.net = None
            self.g, self.d = (
                nn.ModuleList(nn.Linear(64, 64) for _ in range(2)),
                nn.ModuleList(mlp(outputs=1) for _ in range(2)),
            )

        def training_step(self, batch, batch_idx):
            a = batch[0].flatten(1)
            b = a.flip(1)
            opt_g, opt_d = self.optimizers()
            self.toggle_optimizer(opt_g)
            fake_b, fake_a = self.g[0](a), self.g[1](b)
            opt_g.zero_grad()
            self.manual_backward(
                F.l1_loss(self.g[1](fake_b), a)
                + F.l1_loss(self.g[0](fake_a), b)
                - self.d[0](fake_a).mean()
                - self.d[1](fake_b).mean()
            )
            opt_g.step()
            self.untoggle_optimizer(opt_g)
            self.toggle_optimizer(opt_d)
            opt_d.zero_grad()
            loss = sum(
                F.relu(1 - d(real)).mean() + F.relu(1 + d(fake.detach())).mean()
                for d, real, fake in ((self.d[0], a, fake_a), (self.d[1], b, fake_b))
            )
            self.manual_backward(loss)
            opt_d.step()
            self.untoggle_optimizer(opt_d)

        def configure_optimizers(self):
            return torch.optim.Adam(self.g.parameters(), 1e-3), torch.optim.Adam(self.d.parameters(), 1e-3)

    return M(), *digits()


@no_bug()
def toggle_frequencies():
    """One optimizer steps at each fifth batch only."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.extra = nn.Parameter(torch.zeros(10))

        def training_step(self, batch, batch_idx):
            a, b = self.optimizers()
            loss = F.cross_entropy(self.net(batch[0]) + self.extra, batch[1])
            self.manual_backward(loss)
            a.step()
            a.zero_grad()
            if batch_idx % 5 == 4:
                b.step()
                b.zero_grad()

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.SGD([self.extra], 0.1)

    return M(), *digits()


@no_bug()
def unet():
    """A U-Net with skip connections, pixels as classes, dice loss besides."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.down, self.up, self.last = (
                None,
                nn.Conv2d(1, 8, 3, padding=1),
                nn.Conv2d(16, 8, 3, padding=1),
                nn.Conv2d(8, 3, 1),
            )
            self.mid = nn.Conv2d(8, 8, 3, padding=1)

        def loss(self, x, y):
            a = self.down(x).relu()
            b = F.interpolate(self.mid(F.max_pool2d(a, 2)).relu(), scale_factor=2)
            out = self.last(self.up(torch.cat([a, b], 1)).relu())
            p, t = out.softmax(1), F.one_hot(y, 3).movedim(-1, 1)
            dice = 1 - (2 * (p * t).sum((0, 2, 3)) / (p + t).sum((0, 2, 3))).mean()
            return F.cross_entropy(out, y) + dice

    x, y = segments()
    return M(), *halves(x, y, split=256)


@no_bug()
def pixels_flattened():
    """Logits are flattened after the classes were moved to the end."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))

        def loss(self, x, y):
            return F.cross_entropy(self.net(x).permute(0, 2, 3, 1).reshape(-1, 3), y.reshape(-1), ignore_index=2)

    x, y = segments()
    return M(), *halves(x, y, split=256)


@no_bug()
def time_first():
    """A recurrent network with time first, transposed correctly."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.net = nn.Embedding(12, 16), nn.LSTM(16, 32), nn.Linear(32, 12)

        def loss(self, x, y):
            out = self.net(self.rnn(self.embed(x.T))[0])
            return F.cross_entropy(out.reshape(-1, 12), y.T.reshape(-1))

    t = tokens()
    return M(), *halves(t[:, :-1], t[:, 1:])


@no_bug()
def square_batch():
    """As many samples as time steps."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.rnn, self.net = nn.GRU(5, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x):
            return self.net(self.rnn(x)[0].mean(1))

    x, y = sequences()
    return M(), *loaders(TensorDataset(x[:480], y[:480]), TensorDataset(x[480:], y[480:]), batch=12)


@no_bug()
def channel_shuffle():
    """ShuffleNet's channel shuffle, patches and window attention: many reshapes."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.conv, self.attention, self.net = (
                nn.Conv2d(1, 12, 3, padding=1),
                nn.MultiheadAttention(12, 3, batch_first=True),
                nn.Linear(12, 10),
            )

        def forward(self, x):
            x = self.conv(x)
            n, c, h, w = x.shape
            x = x.view(n, 3, 4, h, w).transpose(1, 2).reshape(n, c, h, w)
            x = x.view(n, c, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c)
            x = self.attention(x, x, x)[0].view(n, 4, 16, c)
            return self.net(x.mean((1, 2)))

    return M(), *digits()


@no_bug()
def graph():
    """Full-batch graph convolution; a batch is indices of nodes."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(64, 10)
            x, y = digits(200, 1, loaded=False)[0].tensors
            self.register_buffer("nodes", x.flatten(1))
            self.register_buffer("edges", (torch.cdist(x.flatten(1), x.flatten(1)) < 1.8).float())
            self.labels = y

        def logits(self, index):
            return self.net((self.edges @ self.nodes) / self.edges.sum(1, keepdim=True))[index]

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.logits(batch), self.labels[batch])

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.training_step(batch, batch_idx))

    return M(), DataLoader(torch.arange(150), 32, shuffle=True), DataLoader(torch.arange(150, 200), 32)


@no_bug()
def node_batch():
    """A graph network whose nodes of all graphs of a batch are joined (as PyG does)."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.inner, self.net = nn.Linear(5, 16), nn.Linear(16, 4)

        def training_step(self, batch, batch_idx):
            nodes, graph, y = batch
            pooled = torch.zeros(len(y), 16).index_add(0, graph, self.inner(nodes).relu())
            return F.cross_entropy(self.net(pooled), y)

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.training_step(batch, batch_idx))

    x, y = sequences()
    rows = [(x[i, : 4 + i % 8], int(y[i])) for i in range(640)]

    def collate(samples):
        graph = torch.cat([torch.full((len(s),), i) for i, (s, _) in enumerate(samples)])
        return torch.cat([s for s, _ in samples]), graph, torch.tensor([c for _, c in samples])

    return (
        M(),
        DataLoader(rows[:480], 32, shuffle=True, collate_fn=collate),
        DataLoader(rows[480:], 32, collate_fn=collate),
    )


@no_bug()
def ranking():
    """Pairwise differences of predictions and of targets."""

    class M(Table):
        def loss(self, x, y):
            p = self(x)
            return F.softplus(-(p - p.T) * (y[:, None] - y).sign()).mean()

    return M(), *diabetes()


@no_bug()
def kernel():
    """A kernel regression whose centers are as many as the samples of a batch."""

    class M(Table):
        def __init__(self):
            super().__init__()
            self.net, self.centers, self.weights = (
                nn.Linear(10, 1),
                nn.Parameter(torch.randn(32)),
                nn.Parameter(torch.randn(32) * 0.1),
            )

        def loss(self, x, y):
            return F.mse_loss(torch.exp(-(self.net(x) - self.centers).square()) @ self.weights, y)

    train, val = diabetes(loaded=False)
    return M(), *loaders(train, val)


@no_bug()
def quantile():
    """Three quantiles of one target by broadcasting (N, 3) with (N, 1)."""

    class M(Table):
        def network(self):
            return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))

        def loss(self, x, y):
            error = y[:, None] - self(x)
            levels = torch.tensor([0.1, 0.5, 0.9])
            return torch.maximum(levels * error, (levels - 1) * error).mean()

    return M(), *diabetes()


@no_bug()
def ensemble():
    """An ensemble by broadcasting: (M, N) against (N,)."""

    class M(Table):
        def __init__(self):
            super().__init__()
            self.net = nn.ModuleList(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(5))

        def loss(self, x, y):
            return (torch.stack([m(x)[:, 0] for m in self.net]) - y).square().mean()

    return M(), *diabetes()


@no_bug()
def gaussian():
    """Gaussian_nll_loss and a softplus variance."""

    class M(Table):
        def network(self):
            return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))

        def loss(self, x, y):
            mean, variance = self(x).unbind(1)
            return F.gaussian_nll_loss(mean, y, F.softplus(variance) + 1e-3)

    return M(), *diabetes()


@no_bug()
def poisson():
    """Counts by poisson_nll_loss; a ReLU output for targets that are not negative."""

    class M(Table):
        def loss(self, x, y):
            return F.poisson_nll_loss(self(x)[:, 0], y.abs().round()) + 0.1 * F.mse_loss(
                F.softplus(self(x)[:, 0]), y.abs()
            )

    return M(), *diabetes()


@no_bug()
def tanh_output():
    """A tanh output for pixels scaled to -1 to 1."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64), nn.Tanh())

        def loss(self, x, y):
            return F.mse_loss(self(x), x.flatten(1) * 2 - 1)

    return M(), *digits()


@no_bug()
def soft_labels():
    """Soft labels, cutmix in the collate function."""

    class M(Base):
        def loss(self, x, y):
            return F.cross_entropy(self(x), y)

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]))

    def collate(samples):
        x, y = torch.stack([s for s, _ in samples]), F.one_hot(torch.stack([t for _, t in samples]), 10).float()
        x = x.clone()
        x[:, :, :4] = x.flip(0)[:, :, :4]
        return x, (y + y.flip(0)) / 2

    train, val = digits(loaded=False)
    return M(), DataLoader(train, 32, shuffle=True, collate_fn=collate), DataLoader(val, 32)


@no_bug()
def log_softmax_twice():
    """Cross_entropy after log_softmax, which changes nothing."""

    class M(Base):
        def forward(self, x):
            return self.net(x).log_softmax(1)

    return M(), *digits()


@no_bug()
def gumbel():
    """Hard Gumbel softmax in the middle; a relu far from the loss."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.select, self.net = nn.Linear(64, 16), nn.Linear(16, 10)

        def forward(self, x):
            return self.net(F.gumbel_softmax(self.select(x.flatten(1)), hard=True))

    return M(), *digits()


@no_bug()
def attention_pooling():
    """Softmax over a dimension of size 1 that happens to be one head or one instance."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.score, self.net = nn.Linear(5, 1), nn.Linear(5, 4)

        def forward(self, x):
            return self.net((self.score(x).softmax(1) * x).sum(1))

    x, y = sequences(length=1)
    return M(), *halves(x, y)


@no_bug()
def adapters_in_eval():
    """A frozen body in evaluation mode with trained adapters, as LoRA libraries leave it, without dropout."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU()).requires_grad_(False).eval()
            self.adapter, self.net = nn.Linear(32, 32), nn.Linear(32, 10)

        def forward(self, x):
            h = self.body(x)
            return self.net(h + self.adapter(h))

    return M(), *digits()


@no_bug()
def train_eval_loaders():
    """Validation also evaluates a part of the training data."""

    class M(Base):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log(("val/loss", "val/train_loss")[dataloader_idx], self.loss(*batch))

    train, val = digits(loaded=False)
    return M(), DataLoader(train, 32, shuffle=True), [DataLoader(val, 32), DataLoader(Subset(train, range(64)), 32)]


@no_bug()
def metrics():
    """Metrics computed within an epoch, and a running mean over all epochs."""

    from torchmetrics.wrappers import Running

    class M(Base):
        def __init__(self):
            super().__init__()
            self.acc, self.recent = Accuracy("multiclass", num_classes=10), Running(MeanSquaredError(), window=5)

        def training_step(self, batch, batch_idx):
            out = self(batch[0])
            self.acc.update(out, batch[1])
            self.recent.update(out.softmax(1), F.one_hot(batch[1], 10).float())
            if batch_idx % 10 == 9:
                self.log("train/acc", self.acc.compute())
                self.acc.reset()
            return F.cross_entropy(out, batch[1])

    return M(), *digits()


@no_bug(val_check_interval=0.25)
def val_interval():
    """Validation four times per epoch."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.train_acc, self.val_acc = (Accuracy("multiclass", num_classes=10) for _ in range(2))

        def training_step(self, batch, batch_idx):
            out = self(batch[0])
            self.log("train/acc", self.train_acc(out, batch[1]))
            self.train_acc.update(out, batch[1])
            return F.cross_entropy(out, batch[1])

        def validation_step(self, batch, batch_idx):
            self.val_acc.update(self(batch[0]), batch[1])

        def on_validation_epoch_end(self):
            self.log("val/acc", self.val_acc.compute())
            self.val_acc.reset()

    return M(), *digits()


@no_bug(max_epochs=5)
def schedules():
    """Two schedulers, one per step and one per epoch; ExponentialLR per epoch."""

    class M(Base):
        def configure_optimizers(self):
            o = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
            lr = torch.optim.lr_scheduler
            return [o], [
                {"scheduler": lr.LinearLR(o, 0.1, total_iters=20), "interval": "step"},
                {"scheduler": lr.ExponentialLR(o, 0.5), "interval": "epoch"},
            ]

    return M(), *digits()


@no_bug(max_epochs=10)
def polynomial():
    """MultiStepLR of milestones in epochs, ten epochs."""

    class M(Base):
        def configure_optimizers(self):
            o = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
            return [o], [torch.optim.lr_scheduler.MultiStepLR(o, [5, 8])]

    return M(), *digits()


@no_bug()
def swin_decay():
    """Layer-wise learning rates, four parameter groups, one with rate 0 for frozen embeddings."""

    class M(Base):
        def network(self):
            return nn.Sequential(
                nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
            )

        def configure_optimizers(self):
            layers = [self.net[1], self.net[3], self.net[5]]
            return torch.optim.AdamW(
                [
                    {"params": layer.parameters(), "lr": 1e-2 * 0.1**i if i < 2 else 0.0}
                    for i, layer in enumerate(reversed(layers))
                ]
            )

    return M(), *digits()


@no_bug()
def adafactor_like():
    """SGD with momentum and large weight decay on a rate of 0.01, nesterov, maximize of a reward."""

    class M(Base):
        def loss(self, x, y):
            return -F.cross_entropy(self(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(
                self.parameters(), 0.05, momentum=0.9, nesterov=True, maximize=True, weight_decay=0.01
            )

        def validation_step(self, batch, batch_idx):
            self.log("val/reward", self.loss(*batch))

    return M(), *digits()


@no_bug()
def own_optimizer_step():
    """Optimizer_step is overridden for a warm-up, as in Lightning's documentation."""

    class M(Base):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step(closure=optimizer_closure)
            scale = min(1.0, (self.trainer.global_step + 1) / 20)
            for group in optimizer.param_groups:
                group["lr"] = scale * 1e-2

    return M(), *digits()


@no_bug(gradient_clip_val=0.5, gradient_clip_algorithm="value")
def gradient_noise():
    """Gradients are changed in on_after_backward and clipped by value."""

    class M(Base):
        def on_after_backward(self):
            for p in self.parameters():
                p.grad.add_(torch.randn_like(p.grad) * 1e-3)

    return M(), *digits()


@no_bug()
def set_to_zero():
    """Gradients are set to zero, not to None; a branch is used at random."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.other = mlp()

        def forward(self, x):
            return (self.other if self.training and torch.rand(()) < 0.5 else self.net)(x)

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=False)

    return M(), *digits()


@no_bug()
def relu6_sparse():
    """A wide sparse layer, most of whose units are zero for most samples."""

    class M(Base):
        def network(self):
            net = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
            nn.init.constant_(net[1].bias, -0.5)
            return net

    return M(), *digits()


@no_bug()
def rare_expert():
    """A branch with a ReLU that most batches do not reach."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.rare = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))

        def forward(self, x):
            out = self.net(x)
            rare = x.flatten(1).sum(1) > 24
            if rare.any():
                out = out.index_add(0, rare.nonzero()[:, 0], self.rare(x.flatten(1)[rare]))
            return out

    return M(), *digits()


@no_bug()
def unused_in_training():
    """A decoder is used in validation and for prediction only, on purpose frozen."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.decoder = nn.Linear(10, 64).requires_grad_(False)

        def predict_step(self, batch, batch_idx):
            return self.decoder(self(batch[0]))

    return M(), *digits()


@no_bug()
def parameter_list():
    """Parameters in a ParameterList and a dict of layers that getattr finds."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(10)) for _ in range(2)])
            for i in range(2):
                setattr(self, f"layer_{i}", nn.Linear(64 if i == 0 else 10, 10))

        def forward(self, x):
            x = x.flatten(1)
            for i in range(2):
                x = getattr(self, f"layer_{i}")(x) * self.scales[i]
            return x

    m = M()
    del m.net
    return m, *digits()


@no_bug()
def huggingface():
    """A BERT of transformers, dropout on, its pooler unused (add_pooling_layer=False)."""

    from transformers import BertConfig, BertModel

    class M(Base):
        def __init__(self):
            super().__init__()
            config = BertConfig(
                vocab_size=12,
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=32,
                max_position_embeddings=16,
            )
            self.body, self.net = BertModel(config, add_pooling_layer=False), nn.Linear(16, 4)

        def forward(self, x):
            return self.net(self.body(x).last_hidden_state[:, 0])

    t = tokens()
    return M(), *loaders(TensorDataset(t[:480], t[:480, 0] % 4), TensorDataset(t[480:], t[480:, 0] % 4))


@no_bug(max_epochs=2)
def imagenet_style():
    """No validation labels overlap: few samples, 100 classes."""

    class M(Base):
        def network(self):
            return mlp(outputs=100)

    x, _ = digits(960, 1, loaded=False)[0].tensors
    y = torch.randint(0, 100, (960,), generator=torch.Generator().manual_seed(0))
    return M(), *loaders(TensorDataset(x[:640], y[:640]), TensorDataset(x[640:], y[640:]))


@no_bug()
def forecast_scaled():
    """The validation period is ten times as volatile."""

    class M(LossOnly):
        def network(self):
            return nn.Linear(10, 1)

        def loss(self, x, y):
            return F.mse_loss(self(x)[:, 0], y)

    g = torch.Generator().manual_seed(0)
    series = torch.cat([torch.randn(700, generator=g), 8 * torch.randn(300, generator=g)])
    w = series.unfold(0, 11, 1)
    return (
        M(),
        DataLoader(TensorDataset(w[:680, :10], w[:680, 10]), 32),
        DataLoader(TensorDataset(w[700:, :10], w[700:, 10]), 32),
    )
