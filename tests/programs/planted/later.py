"""Bugs that were written after the checks, in the style of published code: docs/diagnosis.md has their first count."""

import copy
from functools import partial

import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping
from programs import (
    Base,
    Causal,
    Convnet,
    LossOnly,
    Manual,
    Table,
    bug,
    diabetes,
    digits,
    halves,
    loaders,
    mlp,
    segments,
    sequences,
    tokens,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

# Losses and targets


@bug("double-softmax")
def softmax_layer_smoothed():
    """A network that ends with nn.Softmax, and cross-entropy with label smoothing and class weights."""

    class M(Base):
        def network(self):
            return nn.Sequential(*mlp(), nn.Softmax(dim=-1))

        def __init__(self):
            super().__init__()
            self.criterion = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 10), label_smoothing=0.1)

        def loss(self, x, y):
            return self.criterion(self(x), y)

    return M(), *digits()


@bug("softmax-of-batch", "mixing")
def log_softmax_of_batch():
    """Log_softmax over dim=0, the samples."""

    class M(LossOnly):
        def loss(self, x, y):
            return F.nll_loss(F.log_softmax(self(x), dim=0), y)

    return M(), *digits()


@bug("mixing")
def normalized_over_batch():
    """Embeddings are normalized along dim=0, as F.normalize was called without dim=1."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.classes = nn.Linear(16, 10)

        def network(self):
            return mlp(outputs=16)

        def forward(self, x):
            return self.classes(4 * F.normalize(self.net(x), dim=0))

    return M(), *digits()


@bug("double-sigmoid")
def sigmoid_in_decoder():
    """An autoencoder whose decoder ends with a sigmoid, trained by BCEWithLogitsLoss with pos_weight."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = None
            self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
            self.decoder = nn.Sequential(nn.Linear(16, 64), nn.Sigmoid())
            self.criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0))

        def loss(self, x, y):
            return self.criterion(self.decoder(self.encoder(x)), x.flatten(1))

    return M(), *digits()


@bug("broadcasting")
def huber_of_column():
    """A huber loss of (N, 1) and (N,)."""

    class M(Table):
        def loss(self, x, y):
            return nn.HuberLoss(delta=0.5)(self(x), y)

    return M(), *diabetes()


@bug("broadcasting")
def normal_of_column():
    """The log-likelihood of targets (N,) under a normal distribution of shape (N, 1)."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))

        def loss(self, x, y):
            mean, raw = self(x).chunk(2, 1)
            return -torch.distributions.Normal(mean, F.softplus(raw) + 0.1).log_prob(y).mean()

    return M(), *diabetes()


@bug("broadcasting")
def accuracy_of_column():
    """The accuracy of a binary classifier compares predictions (N, 1) with labels (N,)."""

    class M(Base):
        def network(self):
            return mlp(outputs=1)

        def loss(self, x, y):
            return F.binary_cross_entropy_with_logits(self(x)[:, 0], (y % 2).float())

        def validation_step(self, batch, batch_idx):
            x, y = batch
            predicted = (self(x) > 0).long()
            self.log("val/acc", (predicted == y % 2).float().mean())

    return M(), *digits()


@bug("not-log")
def kl_of_log_targets():
    """Distillation: the targets of kl_div are logarithms, but log_target=True is missing."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.teacher = mlp(hidden=128).requires_grad_(False).eval()

        def loss(self, x, y):
            hard, soft = self(x).log_softmax(1), self.teacher(x).log_softmax(1)
            return F.kl_div(hard, soft, reduction="batchmean")

    return M(), *digits()


@bug("range")
def tanh_of_unscaled():
    """A generator-like decoder with tanh, the images are in 0 to 255."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64), nn.Tanh())

        def loss(self, x, y):
            return F.l1_loss(self(x / 255), x.flatten(1))

    train, val = digits(loaded=False)
    return M(), *loaders(*(TensorDataset((d.tensors[0] * 255).round(), d.tensors[1]) for d in (train, val)))


@bug("margin-target")
def margin_of_zero_and_one():
    """Soft_margin_loss expects -1 and 1, the labels are 0 and 1."""

    class M(LossOnly):
        def network(self):
            return mlp(outputs=1)

        def loss(self, x, y):
            return F.soft_margin_loss(self(x)[:, 0], (y % 2).float())

    return M(), *digits()


@bug("target-sum")
def cross_entropy_of_multi_hot():
    """Several labels of a sample, but the loss of a single one: multi-hot rows are passed to cross_entropy."""

    class M(LossOnly):
        def network(self):
            return mlp(outputs=6)

        def loss(self, x, y):
            return F.cross_entropy(
                self(x), torch.stack([y % 2 == 0, y % 3 == 0, y > 4, y > 6, y < 3, y == 1], 1).float()
            )

    return M(), *digits()


@bug("ignored-class")
def first_class_ignored():
    """Ignore_index=0 is kept from a language model, where 0 was padding; here it is a class."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.criterion = nn.CrossEntropyLoss(ignore_index=0)

        def loss(self, x, y):
            return self.criterion(self(x), y)

    return M(), *digits()


@bug("not-log")
def poisson_of_rates():
    """Poisson_nll_loss gets rates, but log_input=True is its default."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1), nn.Softplus())

        def loss(self, x, y):
            return F.poisson_nll_loss(self(x)[:, 0], y.float())

    return M(), *digits()


@bug("not-log")
def ctc_of_logits():
    """CTC without log_softmax."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.rnn, self.net = nn.GRU(5, 32, batch_first=True, bidirectional=True), nn.Linear(64, 5)

        def loss(self, x, y):
            out = self.net(self.rnn(x)[0]).transpose(0, 1)
            lengths = torch.full((len(x),), x.shape[1]), torch.full((len(x),), 1)
            return F.ctc_loss(out, y[:, None] + 1, *lengths)

    return M(), *halves(*sequences())


# Gradients and parameters


@bug("cut-gradient")
def auxiliary_loss_detached():
    """The reconstruction loss is added as a number, to log it."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.net = None
            self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
            self.classifier, self.decoder = nn.Linear(32, 10), nn.Linear(32, 64)

        def forward(self, x):
            return self.classifier(self.encoder(x))

        def training_step(self, batch, batch_idx):
            x, y = batch
            features = self.encoder(x)
            losses = {"ce": F.cross_entropy(self.classifier(features), y)}
            losses["rec"] = F.mse_loss(self.decoder(features), x.flatten(1)).item()
            return losses["ce"] + 0.1 * losses["rec"]

    return M(), *digits()


@bug("cut-gradient")
def generator_detached():
    """The generator's loss is computed on samples that were detached for the discriminator."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.net = None
            self.generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
            self.discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

        def training_step(self, batch, batch_idx):
            real = batch[0].flatten(1)
            opt_g, opt_d = self.optimizers()
            fake = self.generator(torch.randn(len(real), 8)).detach()
            loss_d = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
            opt_d.zero_grad()
            self.manual_backward(loss_d)
            opt_d.step()
            loss_g = F.softplus(-self.discriminator(fake)).mean()
            opt_g.zero_grad()
            self.manual_backward(loss_g)
            opt_g.step()

        def configure_optimizers(self):
            return [torch.optim.Adam(m.parameters(), 2e-4) for m in (self.generator, self.discriminator)], []

    return M(), *digits()


@bug("unregistered")
def indexed_parameter():
    """A positional embedding nn.Parameter(…)[None] is a tensor, not a parameter."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.places = nn.Parameter(torch.randn(8, 32) * 0.02)[None]
            self.embed, self.net = nn.Linear(8, 32), nn.Linear(32, 10)
            self.body = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)

        def forward(self, x):
            return self.net(self.body(self.embed(x[:, 0]) + self.places).mean(1))

    return M(), *digits()


@bug("unregistered")
def plain_tensor():
    """A learned temperature that is a tensor with requires_grad, in no optimizer."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.log_scale = torch.zeros(1, requires_grad=True)

        def forward(self, x):
            return self.net(x) * self.log_scale.exp()

    return M(), *digits()


@bug("unregistered")
def experts_in_dict():
    """Heads of several tasks in a Python dict."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.heads = {"digit": nn.Linear(32, 10), "even": nn.Linear(32, 2)}

        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())

        def loss(self, x, y):
            z = self.net(x)
            return F.cross_entropy(self.heads["digit"](z), y) + F.cross_entropy(self.heads["even"](z), y % 2)

    return M(), *digits()


@bug("split-layer", "in-no-optimizer")
def token_in_no_group():
    """Parameter groups are made of the submodules, so the class token and the positions of a ViT are in none."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.embed, self.net = nn.Linear(8, 32), nn.Linear(32, 10)
            self.token = nn.Parameter(torch.randn(1, 1, 32) * 0.02)
            self.places = nn.Parameter(torch.randn(1, 9, 32) * 0.02)
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x):
            x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x[:, 0])], 1) + self.places
            return self.net(self.body(x)[:, 0])

        def configure_optimizers(self):
            parts = [(self.embed, 1e-3), (self.body, 1e-3), (self.net, 1e-2)]
            return torch.optim.AdamW([{"params": m.parameters(), "lr": lr} for m, lr in parts])

    return M(), *digits()


@bug("foreign-optimizer")
def head_replaced_later():
    """The optimizer is made in __init__; setup replaces the head for the classes of the data."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.net = mlp(outputs=1000)
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

        def setup(self, stage):
            self.net[3] = nn.Linear(64, 10)

        def configure_optimizers(self):
            return self.optimizer

    return M(), *digits()


@bug("teacher-trained")
def teacher_not_frozen():
    """The teacher of a distillation is neither frozen nor left out of the optimizer."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.teacher = mlp(hidden=128)

        def loss(self, x, y):
            out, soft = self(x), self.teacher(x)
            match = F.kl_div((out / 4).log_softmax(1), (soft / 4).softmax(1), reduction="batchmean")
            return 0.5 * F.cross_entropy(out, y) + 8 * match

    return M(), *digits()


@bug("average-unchanged")
def average_never_updated():
    """Validation uses a moving average of the weights, which nothing updates."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.average = copy.deepcopy(self.net).requires_grad_(False)

        def forward(self, x):
            return self.net(x) if self.training else self.average(x)

        def update_average(self, decay=0.99):
            with torch.no_grad():
                for slow, fast in zip(self.average.parameters(), self.net.parameters(), strict=True):
                    slow.lerp_(fast, 1 - decay)

    return M(), *digits()


@bug("rounded-gradient")
def rounded_activations():
    """Activations are quantized by round(), without a straight-through estimator."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Sigmoid())
            self.head = nn.Linear(64, 10)

        def forward(self, x):
            return self.head(torch.round(self.net(x) * 15) / 15)

    return M(), *digits()


@bug("nothing-trained")
def loss_clamped():
    """Outliers of the loss are clamped: all of it."""

    class M(Base):
        def loss(self, x, y):
            return torch.clamp(super().loss(x, y), max=1.0)

    return M(), *digits()


# Optimizers and schedules


@bug("not-cleared")
def one_of_two_not_cleared():
    """Alternating optimizers: gradients of the second are never cleared."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.body, self.head = mlp(outputs=32), nn.Linear(32, 10)

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            first.zero_grad()
            self.manual_backward(F.cross_entropy(self.head(self.body(batch[0])), batch[1]))
            first.step()
            second.step()

        def configure_optimizers(self):
            return torch.optim.Adam(self.body.parameters(), 1e-3), torch.optim.SGD(self.head.parameters(), 1e-3)

    return M(), *digits()


@bug("schedule-unused")
def manual_schedule_never_called():
    """Manual optimization, where Lightning does not call schedulers, nor does training_step."""

    class M(Manual):
        def training_step(self, batch, batch_idx):
            opt = self.optimizers()
            opt.zero_grad()
            self.manual_backward(self.loss(*batch))
            opt.step()

        def configure_optimizers(self):
            opt = torch.optim.AdamW(self.parameters(), 1e-3)
            return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, 60)]

    return M(), *digits()


@bug("schedule-unit", max_epochs=4)
def one_cycle_per_epoch():
    """OneCycleLR for all steps, returned without interval=step."""

    class M(Base):
        def configure_optimizers(self):
            opt = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
            steps = self.trainer.estimated_stepping_batches
            return [opt], [torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=steps)]

    return M(), *digits()


@bug("schedule-dead", max_epochs=30)
def exponential_per_step():
    """ExponentialLR(0.95), meant per epoch, is called per step."""

    class M(Base):
        def configure_optimizers(self):
            opt = torch.optim.Adam(self.parameters(), 1e-3)
            schedule = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.95)
            return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return M(), *digits()


@bug("nothing-trained")
def warm_up_of_integers():
    """Linear warm-up by an integer division, which is 0 for 1,000 steps."""

    class M(Base):
        def configure_optimizers(self):
            opt = torch.optim.AdamW(self.parameters(), 1e-3)
            schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1, step // 1000))
            return [opt], [{"scheduler": schedule, "interval": "step"}]

    return M(), *digits()


@bug("huge-update", "same-output", "dead-layer")
def rate_of_sgd_for_adam():
    """Adam with the rate of SGD, times a linear scaling for the batch size."""

    class M(Base):
        lr = 0.1 * 512 / 32

    return M(), *digits()


@bug("monitor-mode", callbacks=lambda: [EarlyStopping("val_loss", mode="max")])
def stops_at_the_best():
    """EarlyStopping of a loss with mode=max, as the monitor was an accuracy before."""

    class M(Base):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(*batch))

    return M(), *digits()


# Modes


@bug("eval-in-training")
def encoder_stays_in_eval():
    """A part is evaluated by a helper that leaves it in evaluation mode."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5))
            self.head = nn.Linear(64, 10)

        def forward(self, x):
            return self.head(self.net(x))

        def on_train_start(self):
            self.features = self.embed(torch.rand(16, 1, 8, 8))

        @torch.no_grad()
        def embed(self, x):
            self.net.eval()
            return self.net(x)

    return M(), *digits()


@bug("dropout-in-validation")
def own_dropout_in_evaluation():
    """A dropout written by hand does not look at self.training."""

    class WordDropout(nn.Module):
        def forward(self, x):
            return x * (torch.rand(x.shape[:2]) > 0.2)[:, :, None]

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.drop, self.rnn, self.net = WordDropout(), nn.GRU(5, 32, batch_first=True), nn.Linear(32, 4)

        def forward(self, x):
            return self.net(self.rnn(self.drop(x))[0][:, -1])

    return M(), *halves(*sequences())


# Sequences and shapes


@bug("future-leak")
def bidirectional_language_model():
    """A language model by a bidirectional LSTM."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.embed, self.net = nn.Embedding(12, 16), nn.Linear(64, 12)
            self.rnn = nn.LSTM(16, 32, batch_first=True, bidirectional=True)

        def loss(self, x, y):
            return F.cross_entropy(self.net(self.rnn(self.embed(x))[0]).transpose(1, 2), y)

    t = tokens()
    return M(), *halves(t[:, :-1], t[:, 1:])


@bug("future-leak")
def causal_convolution_centered():
    """A convolutional language model with padding on both sides."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(12, 32)
            self.net = nn.Sequential(nn.Conv1d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv1d(32, 12, 1))

        def training_step(self, batch, batch_idx):
            ids = batch["input_ids"]
            logits = self.net(self.embed(ids).transpose(1, 2)).transpose(1, 2)
            return F.cross_entropy(logits[:, :-1].reshape(-1, 12), ids[:, 1:].reshape(-1))

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.training_step(batch, batch_idx))

    rows = [{"input_ids": row} for row in tokens()]
    return M(), *loaders(rows[:480], rows[480:])


@bug("reshape-not-transpose", "mixing")
def heads_by_view():
    """Attention splits its heads by view(N, H, T, D) of (N, T, H * D)."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x):
            n, t, c = x.shape
            q, k, v = (part.reshape(n, 4, t, c // 4) for part in self.qkv(x).chunk(3, -1))
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c))

    class M(Base):
        def __init__(self):
            super().__init__()
            self.embed, self.attend, self.net = nn.Linear(5, 32), Attention(), nn.Linear(32, 4)

        def forward(self, x):
            x = self.embed(x)
            return self.net((x + self.attend(x)).mean(1))

    return M(), *halves(*sequences())


@bug("mixing")
def lstm_of_batches():
    """An LSTM without batch_first gets (N, T, F), and its last output is taken along dim 1."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.rnn, self.net = nn.LSTM(5, 32), nn.Linear(32, 4)

        def forward(self, x):
            return self.net(self.rnn(x)[0][:, -1])

    return M(), *halves(*sequences())


@bug("misaligned")
def predictions_sorted():
    """Sequences are sorted by length for packing, and their labels are not."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.rnn, self.net = nn.GRU(5, 32, batch_first=True), nn.Linear(32, 4)

        def forward(self, x):
            order = x[:, :, 1].abs().sum(1).argsort(descending=True)
            return self.net(self.rnn(x[order])[0][:, -1])

    return M(), *halves(*sequences())


@bug("channels-flattened", "misaligned")
def segmentation_by_reshape():
    """Logits (N, C, H, W) are reshaped to rows of C."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 1))

        def loss(self, x, y):
            return nn.CrossEntropyLoss()(self(x).reshape(-1, 3), y.reshape(-1))

    return M(), *halves(*segments(), split=256)


# Data


@bug("overlap")
def validated_on_training_data():
    """Val_dataloader returns the training set."""

    train, _ = digits(loaded=False)
    return Base(), *loaders(train, train)


@bug("group-overlap")
def patients_in_both():
    """A random split of slices, of which each patient has many."""

    class Slices(Dataset):
        def __init__(self, x, y, groups):
            self.x, self.y, self.groups = x, y, groups

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            return self.x[i], self.y[i]

    x, y = digits(960, 1, loaded=False)[0].tensors
    parts = torch.utils.data.random_split(Slices(x, y, [i // 20 for i in range(len(x))]), [640, 320])
    return Base(), *loaders(*parts)


@bug("in-place")
def augmented_in_place():
    """The dataset adds noise to its own array, so that it grows from epoch to epoch."""

    class Noisy(Dataset):
        def __init__(self, x, y):
            self.x, self.y = x.numpy(), y

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            x = self.x[i]
            x += np.random.normal(0, 0.05, x.shape).astype(np.float32)
            return torch.from_numpy(x), self.y[i]

    train, val = digits(loaded=False)
    return Base(), *loaders(Noisy(*train.tensors), val)


@bug("global-seed")
def seeded_in_getitem():
    """The dataset seeds torch for its augmentation, and with it dropout."""

    class Seeded(Dataset):
        def __init__(self, samples):
            self.samples = samples

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, i):
            torch.manual_seed(42)
            x, y = self.samples[i]
            return x + torch.randn_like(x) * 0.2, y

    class M(Base):
        def network(self):
            return Convnet()

    train, val = digits(loaded=False)
    return M(), *loaders(Seeded(train), val)


@bug("few-samples")
def weights_of_classes():
    """WeightedRandomSampler gets a weight of each class, not of each sample."""

    train, val = digits(loaded=False)
    weights = 1 / torch.bincount(train.tensors[1]).float()
    return Base(), DataLoader(train, 32, sampler=WeightedRandomSampler(weights, len(train))), DataLoader(val, 32)


@bug("split-scale")
def validation_not_normalized():
    """Training images are normalized by mean and deviation, those of validation are only in 0 to 1."""

    train, val = digits(loaded=False)
    x = (train.tensors[0] - 0.1307) / 0.3081 * 1.2
    return Base(), *loaders(TensorDataset(x, train.tensors[1]), val)


@bug("nonfinite-data", "nan-hidden")
def division_by_zero():
    """Columns are divided by their deviation within a group, which is 0 for some."""

    train, val = diabetes(loaded=False)
    x = train.tensors[0].clone()
    x[::50, 3] = float("inf")

    class M(Table):
        def loss(self, x, y):
            loss = F.mse_loss(self(x)[:, 0], y, reduction="none")
            return loss[loss.isfinite()].mean() if not self.training else loss.mean().nan_to_num()

    return M(), *loaders(TensorDataset(x, train.tensors[1]), val)


@bug("label-leak", "target-column")
def window_has_its_target():
    """A forecast whose window ends with the value that it is to predict."""

    g = torch.Generator().manual_seed(0)
    series = torch.sin(torch.arange(760) * 0.3) + torch.randn(760, generator=g) * 0.3
    windows = series.unfold(0, 10, 1)

    class M(Table):
        pass

    return M(), *halves(windows, windows[:, -1].clone())


@bug("label-leak")
def teacher_forcing_in_validation():
    """The label is embedded and added to the features, in validation too."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.net = nn.Embedding(10, 32), nn.Linear(64, 32), nn.Linear(32, 10)

        def forward(self, x, y):
            return self.net((self.body(x.flatten(1)) + self.embed(y)).relu())

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(*batch), batch[1])

        def validation_step(self, batch, batch_idx):
            self.log("val_acc", (self(*batch).argmax(-1) == batch[1]).float().mean())

    return M(), *digits()


@bug("divided-twice", accumulate_grad_batches=8)
def divided_in_the_loss():
    """Code of a hand-written loop divides by the steps of accumulation, Lightning does as well."""

    class M(Table):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss / self.trainer.accumulate_grad_batches}

    return M(), *diabetes()


@bug("same-units")
def last_layers_of_ones():
    """Weights are initialized by nn.init.ones_, by a function that is applied to all layers."""

    def init(m):
        if isinstance(m, nn.Linear):
            nn.init.constant_(m.weight, 0.01)
            nn.init.zeros_(m.bias)

    class M(Base):
        def network(self):
            return mlp().apply(init)

    return M(), *digits()


@bug("tiny-update")
def rate_of_a_schedule_divided():
    """A Noam-like rate that is also multiplied by a base of 1e-6."""

    class M(Causal):
        lr = 1e-9

    t = tokens()
    return M(), *halves(t[:, :-1], t[:, 1:])


@bug("bn-momentum")
def momentum_of_keras_everywhere():
    """A norm factory with Keras' defaults, momentum=0.99 and eps=1e-3."""

    class M(Base):
        def network(self):
            return Convnet(norm=partial(nn.BatchNorm2d, momentum=0.99, eps=1e-3))

    return M(), *digits()


@bug("padding-matters")
def padding_attended():
    """A transformer classifier without key_padding_mask, which also averages over padding."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.embed, self.net = nn.Embedding(13, 32, padding_idx=0), nn.Linear(32, 4)
            self.body = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)

        def forward(self, x):
            return self.net(self.body(self.embed(x)).mean(1))

    t = tokens() + 1
    y = t[:, 0] % 4
    for i, row in enumerate(t):
        row[3 + i % 13 :] = 0
    return M(), *halves(t, y)
