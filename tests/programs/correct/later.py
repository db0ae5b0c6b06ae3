"""Correct programs that were written after the checks."""

import copy
from functools import partial

import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging
from programs import (
    Base,
    Causal,
    Convnet,
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
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler


@no_bug()
def mixup_and_cutmix():
    """Soft labels of mixed samples in training, hard ones in validation."""

    class M(Base):
        def network(self):
            return Convnet()

        def training_step(self, batch, batch_idx):
            x, y = batch
            y = F.one_hot(y, 10).float()
            order, share = torch.randperm(len(x)), float(np.random.beta(0.4, 0.4))
            if batch_idx % 2:
                x, y = share * x + (1 - share) * x[order], share * y + (1 - share) * y[order]
            else:
                x = torch.cat([x[..., :4], x[order][..., 4:]], -1)
                y = (y + y[order]) / 2
            return F.cross_entropy(self(x), y)

    return M(), *digits()


@no_bug()
def large_margin_rates():
    """SAM in manual optimization: two passes, the second at weights that are moved and moved back."""

    class M(Manual):
        def training_step(self, batch, batch_idx):
            opt = self.optimizers()
            self.manual_backward(self.loss(*batch))
            with torch.no_grad():
                grads = [p.grad for p in self.parameters()]
                norm = torch.stack([g.norm() for g in grads]).norm() + 1e-12
                steps = [0.05 * g / norm for g in grads]
                for p, e in zip(self.parameters(), steps, strict=True):
                    p.add_(e)
            opt.zero_grad()
            self.manual_backward(self.loss(*batch))
            with torch.no_grad():
                for p, e in zip(self.parameters(), steps, strict=True):
                    p.sub_(e)
            opt.step()
            opt.zero_grad()

    return M(), *digits()


@no_bug(max_epochs=4)
def adam_then_lbfgs():
    """A physics-informed network: both optimizers have all parameters, LBFGS begins after two epochs."""

    class M(Manual):
        def network(self):
            return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

        def residual(self, x):
            x = x.requires_grad_()
            u = self.net(x)
            du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
            return (du + u).square().mean() + (self.net(torch.zeros(1, 1)) - 1).square().mean()

        def training_step(self, batch, batch_idx):
            adam, lbfgs = self.optimizers()
            x = batch[0]
            if self.current_epoch < 2:
                adam.zero_grad()
                self.manual_backward(self.residual(x))
                adam.step()
                return

            def closure():
                lbfgs.zero_grad()
                loss = self.residual(x)
                self.manual_backward(loss)
                return loss

            lbfgs.step(closure)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2), torch.optim.LBFGS(self.parameters(), max_iter=4)

    return M(), *halves(torch.rand(320, 1), torch.zeros(320), split=256)


@no_bug()
def manual_schedule():
    """Manual optimization with a warm-up that training_step calls at each second step."""

    class M(Manual):
        def training_step(self, batch, batch_idx):
            opt = self.optimizers()
            self.manual_backward(self.loss(*batch) / 2)
            if batch_idx % 2:
                self.clip_gradients(opt, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
                opt.step()
                opt.zero_grad()
                self.lr_schedulers().step()

        def configure_optimizers(self):
            opt = torch.optim.AdamW(self.parameters(), 1e-3)
            return [opt], [torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=20)]

    return M(), *digits()


@no_bug()
def manual_schedule_per_epoch():
    """Manual optimization, schedules of two optimizers in on_train_epoch_end."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(10, 10)

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.head(self(batch[0])), batch[1])
            for opt in self.optimizers():
                opt.zero_grad()
            self.manual_backward(loss)
            for opt in self.optimizers():
                opt.step()

        def on_train_epoch_end(self):
            for schedule in self.lr_schedulers():
                schedule.step()

        def configure_optimizers(self):
            opts = [torch.optim.SGD(m.parameters(), 0.1) for m in (self.net, self.head)]
            return opts, [torch.optim.lr_scheduler.StepLR(opt, 2, 0.5) for opt in opts]

    return M(), *digits()


@no_bug()
def truncated_backpropagation():
    """Hidden states are carried over chunks of a sequence, detached."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.rnn, self.net = nn.LSTM(5, 32, batch_first=True), nn.Linear(32, 4)

        def training_step(self, batch, batch_idx):
            x, y = batch
            opt, state = self.optimizers(), None
            for chunk in x.split(4, dim=1):
                out, state = self.rnn(chunk, state)
                opt.zero_grad()
                self.manual_backward(F.cross_entropy(self.net(out[:, -1]), y))
                opt.step()
                state = tuple(s.detach() for s in state)

    return M(), *halves(*sequences())


@no_bug()
def stateful_language_model():
    """A language model that keeps its hidden state from batch to batch, as its loader is not shuffled."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.net = nn.Embedding(12, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 12)
            self.hidden = None

        def loss(self, x, y):
            if self.hidden is not None and self.hidden.shape[1] != len(x):
                self.hidden = None
            out, hidden = self.rnn(self.embed(x), self.hidden)
            self.hidden = hidden.detach()
            return F.cross_entropy(self.net(out).flatten(0, 1), y.flatten())

        def on_validation_start(self):
            self.hidden = None

        on_train_epoch_start = on_validation_end = on_validation_start

    t = tokens()
    train = TensorDataset(t[:480, :-1], t[:480, 1:])
    return M(), DataLoader(train, 32), DataLoader(TensorDataset(t[480:, :-1], t[480:, 1:]), 32)


@no_bug()
def sparse_experts_with_balance():
    """Top-2 routing with noise and a balance loss; a rarely chosen expert gets no gradient."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = None
            self.gate, self.experts = nn.Linear(64, 12), nn.ModuleList(nn.Linear(64, 10) for _ in range(12))

        def loss(self, x, y):
            x = x.flatten(1)
            logits = self.gate(x) + (torch.randn(len(x), 12) * 0.1 if self.training else 0)
            weights, chosen = logits.topk(2, dim=1)
            weights, out = weights.softmax(1), x.new_zeros(len(x), 10)
            for k in range(2):
                for e in chosen[:, k].unique().tolist():
                    rows = (chosen[:, k] == e).nonzero().squeeze(1)
                    out[rows] += weights[rows, k, None] * self.experts[e](x[rows])
            share = logits.softmax(1).mean(0)
            return F.cross_entropy(out, y) + 0.01 * 12 * share.square().sum()

    return M(), *digits()


@no_bug()
def quantiles():
    """Three quantiles of a forecast by the pinball loss."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.register_buffer("levels", torch.tensor([0.1, 0.5, 0.9]))

        def network(self):
            return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))

        def loss(self, x, y):
            gap = y[:, None] - self(x)
            return torch.max(self.levels * gap, (self.levels - 1) * gap).mean()

    return M(), *diabetes()


@no_bug()
def cox():
    """Survival analysis: the partial likelihood sorts the batch by time, and compares samples with each other."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(10, 32), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(32, 1, bias=False))

        def training_step(self, batch, batch_idx):
            x, time, event = batch
            order = time.argsort(descending=True)
            risk, event = self(x).squeeze(1)[order], event[order]
            return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum().clamp(min=1)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.training_step(batch, batch_idx))

    x = torch.randn(640, 10)
    time = torch.distributions.Exponential((x[:, 0]).exp()).sample()
    return M(), *halves(x, time, (torch.rand(640) < 0.7).float())


@no_bug()
def tabular_embeddings():
    """Categories by embeddings, numbers by BatchNorm, and a target that is standardized by the training set."""

    class M(LossOnly):
        def __init__(self, sizes=(4, 7), numbers=3):
            super().__init__()
            self.net = None
            self.embeds = nn.ModuleList(nn.Embedding(n, 4) for n in sizes)
            self.norm = nn.BatchNorm1d(numbers)
            self.mlp = nn.Sequential(
                nn.Linear(11, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 1)
            )

        def training_step(self, batch, batch_idx):
            (categories, numbers), y = batch
            parts = [embed(categories[:, i]) for i, embed in enumerate(self.embeds)]
            return F.mse_loss(self.mlp(torch.cat([*parts, self.norm(numbers)], 1)).squeeze(-1), y)

        def validation_step(self, batch, batch_idx):
            self.log("val_rmse", self.training_step(batch, batch_idx).sqrt())

    g = torch.Generator().manual_seed(0)
    a, b, x = (torch.randint(0, n, (640,), generator=g) for n in (4, 7, 100))
    numbers = torch.stack([x, x % 7, x * 3], 1).float()
    y = (a * 2.0 + x / 50 - b) / 3
    rows = [((torch.stack([a[i], b[i]]), numbers[i]), y[i]) for i in range(640)]
    return M(), *loaders(rows[:480], rows[480:])


@no_bug()
def forecast_with_normalization():
    """Windows of a series, normalized by their own mean and deviation (RevIN), several steps ahead."""

    class M(LossOnly):
        def network(self):
            return nn.Linear(16, 4)

        def loss(self, x, y):
            mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
            return F.mse_loss(self((x - mean) / std) * std + mean, y)

    g = torch.Generator().manual_seed(0)
    series = torch.arange(800) * 0.05 + torch.sin(torch.arange(800) * 0.4) + torch.randn(800, generator=g) * 0.2
    windows = series.unfold(0, 20, 1)
    return M(), *halves(windows[:, :16], windows[:, 16:], split=600)


@no_bug()
def growing_series():
    """Values grow, so that validation, which comes later, has other means than training."""

    class M(Table):
        def network(self):
            return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    series = torch.exp(torch.arange(800) * 0.002) + torch.randn(800, generator=torch.Generator().manual_seed(0)) * 0.05
    windows = series.unfold(0, 17, 1)
    return M(), *halves(windows[:, :16], windows[:, 16], split=600)


@no_bug()
def learned_temperature():
    """CLIP's logit_scale, a parameter of its own group, clamped after each step."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.texts = mlp(outputs=16), nn.Embedding(10, 16)
            self.logit_scale = nn.Parameter(torch.tensor(2.6))

        def loss(self, x, y):
            z, w = F.normalize(self(x), dim=-1), F.normalize(self.texts.weight, dim=-1)
            return F.cross_entropy(self.logit_scale.exp() * z @ w.T, y)

        def on_train_batch_end(self, *args):
            with torch.no_grad():
                self.logit_scale.clamp_(0, 4.6)

        def configure_optimizers(self):
            others = [p for n, p in self.named_parameters() if n != "logit_scale"]
            groups = [{"params": others, "weight_decay": 0.1}, {"params": [self.logit_scale], "weight_decay": 0.0}]
            return torch.optim.AdamW(groups, 1e-3)

    return M(), *digits()


@no_bug()
def straight_through():
    """Activations are rounded, with a straight-through estimator as an autograd function."""

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()

        @staticmethod
        def backward(ctx, grad):
            return grad

    class M(Base):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(64, 10)

        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Sigmoid())

        def forward(self, x):
            h = self.net(x) * 15
            return self.head((Round.apply(h) + (h.round() - h).detach() + h) / 30)

    return M(), *digits()


@no_bug()
def sparse_gradients():
    """nn.Embedding(sparse=True) with SparseAdam, and Adam for the rest."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.embed, self.net = nn.EmbeddingBag(12, 16, sparse=True), nn.Linear(16, 4)

        def training_step(self, batch, batch_idx):
            for opt in self.optimizers():
                opt.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(self.embed(batch[0])), batch[1]))
            for opt in self.optimizers():
                opt.step()

        def configure_optimizers(self):
            return torch.optim.SparseAdam(self.embed.parameters(), 1e-2), torch.optim.Adam(self.net.parameters(), 1e-2)

    t = tokens()
    return M(), *halves(t, t[:, 0] % 4)


@no_bug(callbacks=lambda: [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2)], max_epochs=5)
def weight_averaging():
    """Lightning's StochasticWeightAveraging, with BatchNorm."""

    class M(Base):
        def network(self):
            return Convnet()

    return M(), *digits()


@no_bug(callbacks=lambda: [EarlyStopping("val/acc", mode="max", patience=2)])
def stops_early():
    """Early stopping of an accuracy, and a plateau schedule of the loss."""

    class M(Base):
        def configure_optimizers(self):
            opt = torch.optim.Adam(self.parameters(), 1e-3)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=1)
            return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"}}

    return M(), *digits()


@no_bug()
def reference_policy():
    """Preference optimization: the reference is a frozen copy that is never updated, and is in training_step."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.reference = copy.deepcopy(self.net).eval().requires_grad_(False)

        def loss(self, x, y):
            good, bad = y[:, None], (y[:, None] + 1) % 10
            now = self.net(x).log_softmax(1)
            with torch.no_grad():
                before = self.reference(x).log_softmax(1)
            gain = (now - before).gather(1, good) - (now - before).gather(1, bad)
            return -F.logsigmoid(0.5 * gain).mean()

    return M(), *digits()


@no_bug()
def frozen_metric_network():
    """A frozen network measures samples in validation only, as for FID."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 64))
            self.features = mlp(outputs=8).eval().requires_grad_(False)

        def loss(self, x, y):
            return F.mse_loss(self(x), x.flatten(1))

        def validation_step(self, batch, batch_idx):
            x, out = batch[0], self(batch[0])
            self.log("val_fid", F.mse_loss(self.features(x).mean(0), self.features(out).mean(0)))

    return M(), *digits()


@no_bug()
def late_average():
    """A moving average that begins at step 1,000, which this run does not reach; validation uses it."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.average = copy.deepcopy(self.net).requires_grad_(False)

        def forward(self, x):
            return self.net(x) if self.training else self.average(x)

        def on_train_batch_end(self, *args):
            if self.global_step >= 1000:
                with torch.no_grad():
                    for slow, fast in zip(self.average.parameters(), self.net.parameters(), strict=True):
                        slow.lerp_(fast, 0.01)

    return M(), *digits()


@no_bug()
def deep_mutual_learning():
    """Two students, each of which is the target of the other, with gradients for both."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.peer = mlp(hidden=32)

        def loss(self, x, y):
            a, b = self(x).log_softmax(1), self.peer(x).log_softmax(1)
            kl = F.kl_div(a, b, log_target=True, reduction="batchmean") + F.kl_div(
                b, a, log_target=True, reduction="batchmean"
            )
            return F.nll_loss(a, y) + F.nll_loss(b, y) + kl

    return M(), *digits()


@no_bug()
def r_drop():
    """The same batch twice with other dropout, a symmetric divergence between both."""

    class M(Base):
        def network(self):
            return Convnet()

        def training_step(self, batch, batch_idx):
            x, y = batch
            a, b = self(torch.cat([x, x])).chunk(2)
            p, q = a.log_softmax(-1), b.log_softmax(-1)
            kl = F.kl_div(p, q.exp(), reduction="batchmean") + F.kl_div(q, p.exp(), reduction="batchmean")
            return F.cross_entropy(a, y) + F.cross_entropy(b, y) + kl / 4

    return M(), *digits()


@no_bug()
def teacher_updates():
    """Meta pseudo labels: the teacher has an optimizer of its own, and learns."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.teacher = mlp(hidden=32)

        def training_step(self, batch, batch_idx):
            x, y = batch
            opt_s, opt_t = self.optimizers()
            soft = self.teacher(x)
            opt_t.zero_grad()
            self.manual_backward(F.cross_entropy(soft, y))
            opt_t.step()
            opt_s.zero_grad()
            self.manual_backward(F.cross_entropy(self(x), soft.detach().softmax(1)))
            opt_s.step()

        def configure_optimizers(self):
            return [torch.optim.Adam(m.parameters(), 1e-3) for m in (self.net, self.teacher)], []

    return M(), *digits()


@no_bug()
def balanced_sampler():
    """WeightedRandomSampler with a weight of each sample, of an imbalanced set."""

    train, val = digits(loaded=False)
    x, y = train.tensors
    kept = (y < 5) | (torch.arange(len(y)) % 4 == 0)
    x, y = x[kept], y[kept]
    weights = (1 / torch.bincount(y).float())[y]
    return (
        Base(),
        DataLoader(TensorDataset(x, y), 32, sampler=WeightedRandomSampler(weights, len(y))),
        DataLoader(val, 32),
    )


@no_bug()
def oversampled_after_split():
    """Copies of rare classes in training only."""

    train, val = digits(loaded=False)
    rare = (train.tensors[1] < 2).nonzero()[:, 0].tolist()
    return Base(), *loaders(Subset(train, [*range(len(train)), *rare, *rare, *rare]), val)


@no_bug()
def heavy_augmentation():
    """Training images are cropped, inverted, erased and jittered; those of validation are not."""

    class Augmented(Dataset):
        def __init__(self, samples):
            self.samples = samples

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, i):
            x, y = self.samples[i]
            x = (x - 0.3) / 0.35
            x = x * (0.4 + 1.2 * torch.rand(1)) + torch.randn(1) * 0.3
            top, left = torch.randint(0, 5, (2,)).tolist()
            x = x.clone()
            x[:, top : top + 4, left : left + 4] = 0
            return F.pad(x, (1, 1, 1, 1))[:, top % 3 : top % 3 + 8, left % 3 : left % 3 + 8], y

    train, val = digits(loaded=False)
    val = TensorDataset((val.tensors[0] - 0.3) / 0.35, val.tensors[1])
    return Base(), *loaders(Augmented(train), val)


@no_bug()
def seeded_by_index():
    """A dataset that draws fixed noise for each sample, from a generator that is seeded by its index."""

    class Fixed(Dataset):
        def __init__(self, samples):
            self.samples = samples

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, i):
            x, y = self.samples[i]
            return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(i)) * 0.1, y

    return Base(), *loaders(*(Fixed(d) for d in digits(loaded=False)))


@no_bug()
def cached_dataset():
    """Samples are prepared when they are first read, and kept."""

    class Cached(Dataset):
        def __init__(self, samples):
            self.samples, self.cache = samples, {}

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, i):
            if i not in self.cache:
                x, y = self.samples[i]
                self.cache[i] = (x - x.mean()) / (x.std() + 1e-6), y
            x, y = self.cache[i]
            return x + torch.randn_like(x) * 0.05, y

    train, val = digits(loaded=False)
    return Base(), *loaders(Cached(train), Cached(val))


@no_bug()
def segmentation_with_void():
    """Pixels of label 255 are ignored; the class of most pixels, 0, is not."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 1))

        def loss(self, x, y):
            return F.cross_entropy(self(x), y, ignore_index=255)

    x, y = segments()
    y[:, 0] = 255
    return M(), *halves(x, y, split=256)


@no_bug()
def semi_supervised():
    """Half of the labels are -1, which the loss ignores; consistency of two views for all."""

    class M(Base):
        def training_step(self, batch, batch_idx):
            x, y = batch
            a, b = self(x + torch.randn_like(x) * 0.1), self(x + torch.randn_like(x) * 0.1)
            return F.cross_entropy(a, y, ignore_index=-1) + F.mse_loss(a.softmax(1), b.softmax(1).detach())

    train, val = digits(loaded=False)
    y = train.tensors[1].clone()
    y[::2] = -1
    return M(), *loaders(TensorDataset(train.tensors[0], y), val)


@no_bug()
def tagging_with_padding():
    """Tags of tokens; padding has tag 0, which is ignored, and padding_idx 0."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.embed, self.net = nn.Embedding(13, 16, padding_idx=0), nn.Linear(64, 5)
            self.rnn = nn.LSTM(16, 32, batch_first=True, bidirectional=True)

        def loss(self, x, y):
            lengths = (x > 0).sum(1)
            packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
            return F.cross_entropy(self.net(out).flatten(0, 1), y.flatten(), ignore_index=0)

    x = tokens() + 1
    y = 1 + x % 4
    for i in range(len(x)):
        x[i, 4 + i % 12 :] = 0
        y[i, 4 + i % 12 :] = 0
    return M(), *halves(x, y)


@no_bug()
def masked_transformer():
    """A text classifier that masks padding in attention and in its mean."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.embed, self.net = nn.Embedding(13, 32, padding_idx=0), nn.Linear(32, 4)
            self.places = nn.Embedding(64, 32)
            self.body = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)

        def forward(self, x):
            pad = x == 0
            h = self.embed(x) + self.places(torch.arange(x.shape[1]))
            h = self.body(h, src_key_padding_mask=pad).masked_fill(pad[..., None], 0)
            return self.net(h.sum(1) / (~pad).sum(1, keepdim=True))

    t = tokens() + 1
    y = t[:, 0] % 4
    for i, row in enumerate(t):
        row[3 + i % 13 :] = 0
    return M(), *halves(t, y)


@no_bug()
def text_convolutions():
    """Kim's convolutions with max over time, which do not mask padding."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.embed, self.net = nn.Embedding(13, 16, padding_idx=0), nn.Linear(24, 4)
            self.convs = nn.ModuleList(nn.Conv1d(16, 8, k) for k in (2, 3, 4))

        def forward(self, x):
            h = self.embed(x).transpose(1, 2)
            return self.net(torch.cat([conv(h).relu().amax(2) for conv in self.convs], 1))

    t = tokens() + 1
    y = t[:, 0] % 4
    for i, row in enumerate(t):
        row[5 + i % 11 :] = 0
    return M(), *halves(t, y)


@no_bug()
def hinge_of_signs():
    """Soft_margin_loss and hinge_embedding_loss with targets -1 and 1."""

    class M(LossOnly):
        def network(self):
            return mlp(outputs=1)

        def loss(self, x, y):
            sign, out = (y % 2).float() * 2 - 1, self(x)[:, 0]
            return F.soft_margin_loss(out, sign) + F.hinge_embedding_loss(F.softplus(out), sign)

    return M(), *digits()


@no_bug()
def poisson_of_logs():
    """Counts by poisson_nll_loss of logarithms, and by rates with log_input=False."""

    class M(LossOnly):
        def network(self):
            return mlp(outputs=2)

        def loss(self, x, y):
            out = self(x)
            by_rate = F.poisson_nll_loss(F.softplus(out[:, 1]), y.float(), log_input=False)
            return F.poisson_nll_loss(out[:, 0], y.float()) + by_rate

    return M(), *digits()


@no_bug()
def weighted_soft_targets():
    """Targets of cross_entropy that are weighted by how sure the annotators were."""

    class M(LossOnly):
        def loss(self, x, y):
            sure = 0.7 + 0.3 * (y % 2)
            return F.cross_entropy(self(x), F.one_hot(y, 10) * sure[:, None])

    return M(), *digits()


@no_bug()
def pairwise_labels():
    """Supervised contrastive loss: labels (N, 1) are compared with labels (N,)."""

    class M(LossOnly):
        def network(self):
            return mlp(outputs=16)

        def loss(self, x, y):
            z = F.normalize(self(x), dim=1)
            same = (y.view(-1, 1) == y).float().fill_diagonal_(0)
            log_p = (z @ z.T / 0.5).fill_diagonal_(-1e9).log_softmax(1)
            return -((same * log_p).sum(1) / same.sum(1).clamp(min=1)).mean()

    return M(), *digits()


@no_bug()
def windowed_attention():
    """Windows of a picture by view and permute, and heads that are split correctly."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.embed, self.qkv, self.net = nn.Conv2d(1, 16, 1), nn.Linear(16, 48), nn.Linear(16, 10)

        def forward(self, x):
            x = self.embed(x)
            n, c, h, w = x.shape
            x = x.view(n, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c)
            q, k, v = self.qkv(x).reshape(len(x), 16, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, 4, 16, c)
            return self.net(out.mean((1, 2)))

    return M(), *digits()


@no_bug()
def batch_of_one_image():
    """Pix2pix: batches of one image with BatchNorm, on purpose."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)
            )

        def loss(self, x, y):
            return F.l1_loss(self(x + torch.randn_like(x) * 0.2), x)

    return M(), *digits(60, 20, batch=1)


@no_bug()
def prompt_tuning():
    """Only a prompt that the root holds is trained; the body is left out of the optimizer."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.prompt = nn.Parameter(torch.randn(1, 4, 32) * 0.02)
            self.embed, self.net = nn.Linear(8, 32), nn.Linear(32, 10)
            self.body = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)

        def forward(self, x):
            x = torch.cat([self.prompt.expand(len(x), -1, -1), self.embed(x[:, 0])], 1)
            return self.net(self.body(x)[:, 0])

        def configure_optimizers(self):
            return torch.optim.Adam([self.prompt], 1e-2)

    return M(), *digits()


@no_bug()
def quantile_embedding_codebook():
    """VQ-VAE whose codebook is a buffer that moves by itself, with commitment and straight-through."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.out = mlp(outputs=8), nn.Linear(8, 64)
            self.register_buffer("codes", torch.randn(16, 8))

        def loss(self, x, y):
            z = self(x)
            chosen = torch.cdist(z.detach(), self.codes).argmin(1)
            q = self.codes[chosen]
            if self.training:
                with torch.no_grad():
                    self.codes.index_add_(0, chosen, 0.05 * (z.detach() - q))
            return F.mse_loss(self.out(z + (q - z).detach()), x.flatten(1)) + 0.25 * F.mse_loss(z, q)

    return M(), *digits()


@no_bug()
def causal_dilated():
    """A causal convolutional language model, padded on the left."""

    class M(Causal):
        def __init__(self):
            super().__init__()
            self.embed, self.body = nn.Embedding(12, 32), None
            self.convs, self.net = (
                nn.ModuleList(nn.Conv1d(32, 32, 2, dilation=2**i) for i in range(3)),
                nn.Linear(32, 12),
            )

        def forward(self, x):
            h = self.embed(x).transpose(1, 2)
            for i, conv in enumerate(self.convs):
                h = h + conv(F.pad(h, (2**i, 0))).relu()
            return self.net(h.transpose(1, 2))

    t = tokens()
    return M(), *halves(t[:, :-1], t[:, 1:])


@no_bug(max_epochs=6)
def progressive_unfreezing():
    """Layers are thawed one by one, one in each epoch, from the head."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Flatten(), *(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)), nn.Linear(64, 10)
            )
            for layer in self.net[:-1]:
                layer.requires_grad_(False)

        def on_train_epoch_start(self):
            self.net[max(1, 4 - self.current_epoch)].requires_grad_(True)

    return M(), *digits()


@no_bug(max_epochs=8)
def decays_to_zero():
    """A polynomial schedule per step that ends at exactly 0."""

    class M(Base):
        def configure_optimizers(self):
            opt = torch.optim.AdamW(self.parameters(), 3e-3)
            total = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.PolynomialLR(opt, total, power=2.0)
            return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return M(), *digits()


@no_bug()
def norm_factory():
    """GroupNorm by a factory, stochastic depth in training, and a zero-initialized last scale."""

    class M(Base):
        def network(self):
            return Convnet(norm=partial(nn.GroupNorm, 4))

    return M(), *digits()


@no_bug()
def groups_that_begin_at_zero():
    """A warm-up from 0 of two groups, the second frozen first; betas of a GAN; much dropout."""

    class M(Base):
        def network(self):
            return nn.Sequential(*mlp(64, 256)[:3], nn.Dropout(0.9), nn.Linear(256, 10))

        def configure_optimizers(self):
            first, second = self.net[1], self.net[4]
            groups = [{"params": first.parameters()}, {"params": second.parameters()}]
            optimizer = torch.optim.Adam(groups, 1e-2, betas=(0.0, 0.9))
            rates = [lambda step: min(1.0, step / 5), lambda step: float(step >= 10)]
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return M(), *digits()
