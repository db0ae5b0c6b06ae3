"""Correct programs."""

import copy

import lightning as L
import lightning.pytorch.callbacks as pl_callbacks
import numpy as np
import torch
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
    sequences,
    tokens,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics import Accuracy, MaxMetric, MeanMetric


@no_bug()
def plain_mlp():
    """A plain classifier."""

    return Base(), *digits()


@no_bug()
def convnet():
    """BatchNorm and dropout."""

    class M(Base):
        def network(self):
            return Convnet()

    return M(), *digits()


@no_bug()
def dict_output():
    """Training_step returns a mapping; metrics of torchmetrics; the best accuracy is never reset."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.train_acc, self.val_acc = (Accuracy("multiclass", num_classes=10) for _ in range(2))
            self.val_loss, self.best = MeanMetric(), MaxMetric()

        def training_step(self, batch, batch_idx):
            out = self(batch[0])
            self.train_acc(out, batch[1])
            self.log("train/acc", self.train_acc, on_step=False, on_epoch=True)
            return {"loss": F.cross_entropy(out, batch[1]), "out": out.detach()}

        def validation_step(self, batch, batch_idx):
            out = self(batch[0])
            self.val_loss(F.cross_entropy(out, batch[1]))
            self.val_acc(out, batch[1])
            self.log("val/loss", self.val_loss)
            self.log("val/acc", self.val_acc)

        def on_validation_epoch_end(self):
            self.best(self.val_acc.compute())
            self.log("val/best", self.best.compute())

    return M(), *digits()


@no_bug()
def contrastive():
    """SimCLR: negatives are the other samples of the batch."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(mlp(outputs=32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))

        def loss(self, x, y):
            a, b = (F.normalize(self(x + torch.randn_like(x) * 0.2), dim=1) for _ in range(2))
            z = torch.cat([a, b])
            similarity = (z @ z.T / 0.2).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
            return F.cross_entropy(similarity, torch.arange(len(z)).roll(len(x)))

    return M(), *digits()


@no_bug()
def clip():
    """Two towers, cross-entropy over rows and columns of the batch's similarities."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.image, self.text, self.scale = mlp(outputs=16), nn.Embedding(10, 16), nn.Parameter(torch.tensor(2.0))

        def loss(self, x, y):
            logits = self.scale.exp() * F.normalize(self.image(x), dim=1) @ F.normalize(self.text(y), dim=1).T
            pairs = torch.arange(len(x))
            return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2

        def configure_optimizers(self):
            return torch.optim.Adam([*self.image.parameters(), *self.text.parameters(), self.scale], 1e-2)

    m = M()
    del m.net
    return m, *digits()


@no_bug()
def barlow_twins():
    """The loss is of the correlations within the batch."""

    class M(LossOnly):
        def network(self):
            return mlp(outputs=16)

        def loss(self, x, y):
            a, b = (F.batch_norm(self(x + torch.randn_like(x) * 0.2), None, None, training=True) for _ in range(2))
            c = a.T @ b / len(x)
            return (c.diagonal() - 1).square().sum() + 0.01 * (c - torch.diag(c.diagonal())).square().sum()

    return M(), *digits()


@no_bug()
def vicreg():
    """Mse_loss of two outputs that are both trained."""

    class M(LossOnly):
        def network(self):
            return mlp(outputs=16)

        def loss(self, x, y):
            a, b = (self(x + torch.randn_like(x) * 0.2) for _ in range(2))
            return F.mse_loss(a, b) + F.relu(1 - a.std(0)).mean() + F.relu(1 - b.std(0)).mean()

    return M(), *digits()


@no_bug()
def byol():
    """A momentum network whose parameters are in the optimizer, run under no_grad."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.head = mlp(outputs=16), nn.Linear(16, 16)
            self.slow = copy.deepcopy(self.net)

        def loss(self, x, y):
            a, b = x + torch.randn_like(x) * 0.2, x + torch.randn_like(x) * 0.2
            with torch.no_grad():
                target = self.slow(b)
            return 2 - 2 * F.cosine_similarity(self.head(self.net(a)), target).mean()

        def on_train_batch_end(self, *args):
            with torch.no_grad():
                for fast, slow in zip(self.net.parameters(), self.slow.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)

    return M(), *digits()


@no_bug()
def moco():
    """A queue of negatives."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = mlp(outputs=16)
            self.slow = copy.deepcopy(self.net).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(128, 16), dim=1))

        def loss(self, x, y):
            q = F.normalize(self.net(x + torch.randn_like(x) * 0.2), dim=1)
            with torch.no_grad():
                for fast, slow in zip(self.net.parameters(), self.slow.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)
                k = F.normalize(self.slow(x), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.T], 1) / 0.2
            if self.training:
                self.queue = torch.cat([k, self.queue])[:128].detach()
            return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    return M(), *digits()


@no_bug()
def experts():
    """A mixture of 16 experts, of which each sample uses one; some are used by no sample."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(64, 16), nn.ModuleList(nn.Linear(64, 10) for _ in range(16))

        def forward(self, x):
            x = x.flatten(1)
            weight, chosen = self.gate(x).softmax(1).max(1)
            out = x.new_zeros(len(x), 10)
            for i, expert in enumerate(self.experts):
                rows = (chosen == i).nonzero()[:, 0]
                if len(rows):
                    out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
            return out

    class M(Base):
        def network(self):
            return Experts()

    return M(), *digits()


@no_bug()
def frozen_backbone():
    """A frozen body in evaluation mode."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.body, self.net = Convnet(32).requires_grad_(False).eval(), nn.Linear(32, 10)

        def forward(self, x):
            return self.net(self.body(x))

        def configure_optimizers(self):
            return torch.optim.Adam(self.net.parameters(), 1e-2)

    return M(), *digits()


@no_bug()
def linear_probe():
    """Only the head is in the optimizer, the body is not frozen."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.body, self.net = mlp(outputs=32), nn.Linear(32, 10)

        def forward(self, x):
            return self.net(self.body(x))

        def configure_optimizers(self):
            return torch.optim.Adam(self.net.parameters(), 1e-2)

    return M(), *digits()


@no_bug()
def frozen_norms():
    """BatchNorm layers stay in evaluation mode while the rest trains."""

    class M(Base):
        def network(self):
            return Convnet()

        def on_train_epoch_start(self):
            for m in self.modules():
                if isinstance(m, nn.BatchNorm2d):
                    m.eval()

    return M(), *digits()


@no_bug()
def lora():
    """Adapters whose second matrix starts at 0, beside frozen layers."""

    class LoRA(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer.requires_grad_(False)
            self.a, self.b = (
                nn.Parameter(torch.randn(4, layer.in_features) * 0.1),
                nn.Parameter(torch.zeros(layer.out_features, 4)),
            )

        def forward(self, x):
            return self.layer(x) + x @ self.a.T @ self.b.T

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), LoRA(nn.Linear(64, 64)), nn.ReLU(), LoRA(nn.Linear(64, 10)))

        def configure_optimizers(self):
            return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 1e-2)

    return M(), *digits()


@no_bug()
def bitfit():
    """Only biases are in the optimizer."""

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))

        def configure_optimizers(self):
            return torch.optim.Adam([p for n, p in self.named_parameters() if n.endswith("bias")], 1e-2)

    return M(), *digits()


@no_bug()
def mean_teacher():
    """An averaged teacher, not in the optimizer but with requires_grad."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.teacher = copy.deepcopy(self.net)

        def loss(self, x, y):
            with torch.no_grad():
                target = self.teacher(x).softmax(1)
            out = self.net(x + torch.randn_like(x) * 0.1)
            return F.cross_entropy(out, y) + F.mse_loss(out.softmax(1), target)

        def on_train_batch_end(self, *args):
            with torch.no_grad():
                for s, t in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                    t.lerp_(s, 0.01)

        def configure_optimizers(self):
            return torch.optim.Adam(self.net.parameters(), 1e-2)

    return M(), *digits()


@no_bug()
def distillation():
    """A teacher in evaluation mode, kl_div of log-probabilities."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.teacher = Convnet().eval().requires_grad_(False)

        def loss(self, x, y):
            with torch.no_grad():
                target = F.softmax(self.teacher(x) / 2, 1)
            out = self(x)
            return F.kl_div(F.log_softmax(out / 2, 1), target, reduction="batchmean") * 4 + F.cross_entropy(out, y)

    return M(), *digits()


@no_bug()
def stochastic_depth():
    """Layers are skipped at random while training."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

        def forward(self, x):
            x = self.first(x.flatten(1))
            for layer in self.layers:
                if not self.training or torch.rand(()) < 0.5:
                    x = x + layer(x.relu())
            return self.last(x)

    class M(Base):
        def network(self):
            return Deep()

    return M(), *digits()


@no_bug()
def mc_dropout():
    """Monte Carlo dropout: validation averages eight passes with dropout."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.first, self.net = nn.Linear(64, 64), nn.Linear(64, 10)

        def forward(self, x):
            return self.net(F.dropout(self.first(x.flatten(1)).relu(), 0.2, training=True))

        def validation_step(self, batch, batch_idx):
            p = torch.stack([self(batch[0]).softmax(1) for _ in range(8)]).mean(0)
            self.log("val/loss", F.nll_loss(p.log(), batch[1]))

    return M(), *digits()


@no_bug()
def mc_dropout_module():
    """Dropout modules are put into training mode for validation."""

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))

        def on_validation_epoch_start(self):
            for m in self.modules():
                if isinstance(m, nn.Dropout):
                    m.train()

    return M(), *digits()


@no_bug()
def sparse_embedding():
    """Sparse gradients, rows without a gradient."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.net = nn.EmbeddingBag(1000, 4, sparse=True)

        def forward(self, x):
            return self.net(x)

        def configure_optimizers(self):
            return torch.optim.SparseAdam(list(self.parameters()), 1e-2)

    x, y = torch.randint(0, 200, (640, 6)), torch.randint(0, 4, (640,))
    y = x.sum(1) % 4
    x2 = torch.randint(200, 400, (320, 6))
    return M(), *loaders(TensorDataset(x, y), TensorDataset(x2, x2.sum(1) % 4))


class Tied(Causal):
    tied, dropout = True, 0.1


@no_bug()
def tied_weights():
    """A causal language model whose embedding is its last layer."""

    t = tokens()
    return Tied(), *halves(t[:, :-1], t[:, 1:])


@no_bug()
def shift_inside():
    """The model shifts the targets itself, as in transformers; a batch is one tensor of tokens."""

    class M(Tied):
        def loss(self, tokens):
            out = self(tokens)
            return F.cross_entropy(out[:, :-1].reshape(-1, 12), tokens[:, 1:].reshape(-1))

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    t = tokens()
    return M(), *halves(t)


@no_bug()
def masked_language():
    """15% of tokens are masked; of these, a tenth stays as it is."""

    class M(Tied):
        def forward(self, x):
            return self.net(self.body(self.embed(x) + self.places(torch.arange(x.shape[1], device=x.device))))

        def loss(self, x):
            chosen = torch.rand(x.shape) < 0.3
            kind = torch.rand(x.shape)
            seen = x.masked_fill(chosen & (kind < 0.8), 11)
            seen = torch.where(chosen & (kind > 0.9), torch.randint(0, 11, x.shape), seen)
            return F.cross_entropy(self(seen).flatten(0, 1), x.masked_fill(~chosen, -100).flatten())

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    t = tokens(vocab=11)
    return M(), *halves(t)


@no_bug()
def teacher_forcing():
    """A decoder gets the targets, shifted by one, as inputs."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.embed, self.encoder, self.decoder = (
                nn.Embedding(13, 16),
                nn.GRU(16, 32, batch_first=True),
                nn.GRU(16, 32, batch_first=True),
            )
            self.net = nn.Linear(32, 12)

        def loss(self, x, y):
            _, state = self.encoder(self.embed(x))
            start = torch.full_like(y[:, :1], 12)
            out, _ = self.decoder(self.embed(torch.cat([start, y[:, :-1]], 1)), state)
            return F.cross_entropy(self.net(out).transpose(1, 2), y)

    t = tokens(8)
    return M(), *loaders(TensorDataset(t[:480], t[:480].flip(1)), TensorDataset(t[480:], t[480:].flip(1)))


@no_bug()
def weight_norm():
    """Weight_norm and spectral_norm."""

    class M(Base):
        def network(self):
            a = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
            b = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 10))
            return nn.Sequential(nn.Flatten(), a, nn.ReLU(), b)

    return M(), *digits()


@no_bug(max_epochs=3)
def head_from_epoch_1():
    """A second head is used from the second epoch on."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.body, self.net, self.extra = nn.Linear(64, 32), nn.Linear(32, 10), nn.Linear(32, 2)

        def forward(self, x):
            return self.net(self.body(x.flatten(1)).relu())

        def training_step(self, batch, batch_idx):
            loss = self.loss(*batch)
            if self.current_epoch >= 1:
                loss = loss + F.cross_entropy(self.extra(self.body(batch[0].flatten(1)).relu()), batch[1] % 2)
            return loss

    return M(), *digits()


@no_bug()
def head_from_epoch_9():
    """A second head is used from the tenth epoch on, which this run does not reach."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.body, self.net, self.extra = nn.Linear(64, 32), nn.Linear(32, 10), nn.Linear(32, 2)

        def forward(self, x):
            return self.net(self.body(x.flatten(1)).relu())

        def training_step(self, batch, batch_idx):
            loss = self.loss(*batch)
            if self.current_epoch >= 9:
                loss = loss + F.cross_entropy(self.extra(self.body(batch[0].flatten(1)).relu()), batch[1] % 2)
            return loss

    return M(), *digits()


@no_bug()
def thaw_later():
    """The body runs without gradients until epoch 9."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.body, self.net = mlp(outputs=32), nn.Linear(32, 10)

        def forward(self, x):
            with torch.set_grad_enabled(self.current_epoch >= 9 and torch.is_grad_enabled()):
                hidden = self.body(x)
            return self.net(hidden)

    return M(), *digits()


class Thaw(pl_callbacks.BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.body)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.body, optimizer)


@no_bug(callbacks=lambda: [Thaw()])
def finetuning_callback():
    """BaseFinetuning thaws the body in the second epoch."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.body, self.net = Convnet(32), nn.Linear(32, 10)

        def forward(self, x):
            return self.net(self.body(x))

        def configure_optimizers(self):
            return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 1e-2)

    return M(), *digits()


@no_bug()
def checkpointed():
    """Gradient checkpointing."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.body, self.net = Convnet(32), nn.Linear(32, 10)

        def forward(self, x):
            return self.net(checkpoint(self.body, x, use_reentrant=False))

    return M(), *digits()


@no_bug(accumulate_grad_batches=4)
def accumulated():
    """Accumulate_grad_batches=4."""

    return Base(), *digits()


@no_bug()
def manual_accumulation():
    """Manual optimization that steps after every third batch."""

    class M(Manual):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(*batch) / 3)
            if (batch_idx + 1) % 3 == 0:
                self.optimizers().step()
                self.optimizers().zero_grad()

    return M(), *digits()


@no_bug()
def gan():
    """Two networks and optimizers; the generator's loss leaves gradients in the discriminator."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.net = None
            self.generator = nn.Sequential(
                nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid()
            )
            self.discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(64, 1))

        def training_step(self, batch, batch_idx):
            x = batch[0].flatten(1)
            opt_g, opt_d = self.optimizers()
            fake = self.generator(torch.randn(len(x), 8))
            opt_g.zero_grad()
            self.manual_backward(F.softplus(-self.discriminator(fake)).mean())
            opt_g.step()
            opt_d.zero_grad()
            self.manual_backward(
                (F.softplus(-self.discriminator(x)) + F.softplus(self.discriminator(fake.detach()))).mean()
            )
            opt_d.step()

        def configure_optimizers(self):
            return torch.optim.Adam(self.generator.parameters(), 1e-3), torch.optim.Adam(
                self.discriminator.parameters(), 1e-3
            )

    return M(), *digits()


@no_bug()
def wgan_gp():
    """Five steps of the critic for one of the generator; gradients of the inputs."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.net = None
            self.generator, self.critic = nn.Sequential(nn.Linear(8, 64), nn.Sigmoid()), mlp(outputs=1)

        def training_step(self, batch, batch_idx):
            x = batch[0].flatten(1)
            opt_g, opt_c = self.optimizers()
            fake = self.generator(torch.randn(len(x), 8))
            if batch_idx % 6 == 5:
                opt_g.zero_grad()
                self.manual_backward(-self.critic(fake).mean())
                opt_g.step()
                return
            between = (x + torch.rand(len(x), 1) * (fake.detach() - x)).requires_grad_()
            grads = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)[0]
            opt_c.zero_grad()
            self.manual_backward(
                self.critic(fake.detach()).mean() - self.critic(x).mean() + 10 * (grads.norm(dim=1) - 1).square().mean()
            )
            opt_c.step()

        def configure_optimizers(self):
            return torch.optim.Adam(self.generator.parameters(), 1e-3), torch.optim.Adam(self.critic.parameters(), 1e-3)

    return M(), *digits()


@no_bug()
def delayed_discriminator():
    """VQGAN: the discriminator's loss has weight 0 until step 100,000."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64))
            self.discriminator = mlp(outputs=1)

        def training_step(self, batch, batch_idx):
            x = batch[0].flatten(1)
            opt_g, opt_d = self.optimizers()
            out = self.net(x)
            weight = 0.0 if self.global_step < 100_000 else 1.0
            opt_g.zero_grad()
            self.manual_backward(F.mse_loss(out, x) - weight * self.discriminator(out).mean())
            opt_g.step()
            opt_d.zero_grad()
            self.manual_backward(
                weight * (F.relu(1 - self.discriminator(x)) + F.relu(1 + self.discriminator(out.detach()))).mean()
            )
            opt_d.step()

        def configure_optimizers(self):
            return torch.optim.Adam(self.net.parameters(), 1e-3), torch.optim.Adam(
                self.discriminator.parameters(), 1e-3
            )

    return M(), *digits()


@no_bug()
def conditional_gan():
    """The class is an input of the generator."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.net = None
            self.generator, self.discriminator = (
                nn.Sequential(nn.Linear(18, 64), nn.Sigmoid()),
                nn.Sequential(nn.Linear(74, 32), nn.ReLU(), nn.Linear(32, 1)),
            )

        def training_step(self, batch, batch_idx):
            x, y = batch[0].flatten(1), F.one_hot(batch[1], 10).float()
            opt_g, opt_d = self.optimizers()
            fake = self.generator(torch.cat([torch.randn(len(x), 8), y], 1))

            def judge(pictures):
                return self.discriminator(torch.cat([pictures, y], 1))[:, 0]

            opt_d.zero_grad()
            real, made = judge(x), judge(fake.detach())
            self.manual_backward(
                F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
                + F.binary_cross_entropy_with_logits(made, torch.zeros_like(made))
            )
            opt_d.step()
            opt_g.zero_grad()
            made = judge(fake)
            self.manual_backward(F.binary_cross_entropy_with_logits(made, torch.ones_like(made)))
            opt_g.step()

        def configure_optimizers(self):
            return torch.optim.Adam(self.generator.parameters(), 1e-3), torch.optim.Adam(
                self.discriminator.parameters(), 1e-3
            )

    return M(), *digits()


@no_bug(callbacks=lambda: [pl_callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)])
def averaging():
    """StochasticWeightAveraging."""

    return Base(), *digits()


@no_bug()
def warm_up():
    """The learning rate begins with 0."""

    class M(Base):
        def configure_optimizers(self):
            o = torch.optim.AdamW(self.parameters(), 1e-2)
            return {
                "optimizer": o,
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(s / 40, 1)),
                    "interval": "step",
                },
            }

    return M(), *digits()


@no_bug()
def warm_up_long():
    """The learning rate begins with 0 and rises over 100,000 steps, of which this run does 60."""

    class M(Base):
        def configure_optimizers(self):
            o = torch.optim.AdamW(self.parameters(), 1e-3)
            return {
                "optimizer": o,
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(s / 100_000, 1)),
                    "interval": "step",
                },
            }

    return M(), *digits()


@no_bug()
def one_cycle():
    """OneCycleLR over all steps."""

    class M(Base):
        def configure_optimizers(self):
            o = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
            s = torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=int(self.trainer.estimated_stepping_batches))
            return {"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step"}}

    return M(), *digits()


@no_bug(max_epochs=4)
def cosine_epochs():
    """CosineAnnealingLR over all epochs."""

    class M(Base):
        def configure_optimizers(self):
            o = torch.optim.Adam(self.parameters(), 1e-2)
            return [o], [torch.optim.lr_scheduler.CosineAnnealingLR(o, self.trainer.max_epochs)]

    return M(), *digits()


@no_bug()
def restarts():
    """CosineAnnealingWarmRestarts with a period of 5 steps."""

    class M(Base):
        def configure_optimizers(self):
            o = torch.optim.Adam(self.parameters(), 1e-2)
            return {
                "optimizer": o,
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
                    "interval": "step",
                },
            }

    return M(), *digits()


@no_bug()
def sequential_schedule():
    """Linear warm-up, then cosine, then constant."""

    class M(Base):
        def configure_optimizers(self):
            o = torch.optim.Adam(self.parameters(), 1e-2)
            lr = torch.optim.lr_scheduler
            s = lr.SequentialLR(o, [lr.LinearLR(o, 0.1, total_iters=5), lr.CosineAnnealingLR(o, 30, 1e-4)], [5])
            return {"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step"}}

    return M(), *digits()


@no_bug(callbacks=lambda: [pl_callbacks.EarlyStopping("val/acc", mode="max"), pl_callbacks.EarlyStopping("val/loss")])
def plateau():
    """ReduceLROnPlateau of the validation loss, EarlyStopping and checkpoints of the accuracy."""

    class M(Base):
        def configure_optimizers(self):
            o = torch.optim.Adam(self.parameters(), 1e-2)
            return {
                "optimizer": o,
                "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(o), "monitor": "val/loss"},
            }

    return M(), *digits()


@no_bug()
def tiny_targets():
    """Regression of targets around 1e-6."""

    train, val = diabetes(loaded=False)
    parts = [TensorDataset(d.tensors[0], d.tensors[1] * 1e-6) for d in (train, val)]

    class M(Table):
        lr = 1e-3

    return M(), *loaders(*parts)


@no_bug()
def large_targets():
    """Regression of targets up to 346."""

    return Table(), *diabetes(scale=False)


@no_bug()
def uncertainty_weights():
    """Two tasks whose weights are learned."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.body, self.digit, self.parity = nn.Linear(64, 32), nn.Linear(32, 10), nn.Linear(32, 1)
            self.net, self.log_variance = None, nn.Parameter(torch.zeros(2))

        def loss(self, x, y):
            hidden = self.body(x.flatten(1)).relu()
            losses = torch.stack(
                [
                    F.cross_entropy(self.digit(hidden), y),
                    F.binary_cross_entropy_with_logits(self.parity(hidden)[:, 0], (y % 2).float()),
                ]
            )
            return (losses * (-self.log_variance).exp() + self.log_variance).sum()

    return M(), *digits()


@no_bug()
def alternating_tasks():
    """Each batch trains one of five heads."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.body, self.net, self.heads = (
                nn.Linear(64, 32),
                None,
                nn.ModuleList(nn.Linear(32, 10) for _ in range(5)),
            )

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.heads[batch_idx % 5](self.body(batch[0].flatten(1)).relu()), batch[1])

        def validation_step(self, batch, batch_idx):
            pass

    return M(), *digits()


@no_bug()
def lazy_regularization():
    """A head is used at each 100th step, which this run does not reach."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.aux = mlp(outputs=2)

        def training_step(self, batch, batch_idx):
            loss = self.loss(*batch)
            if self.global_step % 100 == 99:
                loss = loss + F.cross_entropy(self.aux(batch[0]), batch[1] % 2)
            return loss

    return M(), *digits()


@no_bug()
def variable_length():
    """Padded sequences of different lengths, packed; each batch has another length."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.net = (
                nn.Embedding(13, 16, padding_idx=12),
                nn.GRU(16, 32, batch_first=True),
                nn.Linear(32, 4),
            )

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(
                self.embed(x), lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            return self.net(self.rnn(packed)[1][0])

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch["tokens"], batch["lengths"]), batch["label"])

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.training_step(batch, batch_idx))

    t = tokens(16)
    rows = [(t[i, : 3 + i % 13], int(t[i, 0]) % 4) for i in range(640)]

    def collate(samples):
        lengths = torch.tensor([len(s) for s, _ in samples])
        padded = nn.utils.rnn.pad_sequence([s for s, _ in samples], batch_first=True, padding_value=12)
        return {"tokens": padded, "lengths": lengths, "label": torch.tensor([y for _, y in samples])}

    return M(), *loaders(rows[:480], rows[480:], collate_fn=collate)[:1], DataLoader(rows[480:], 32, collate_fn=collate)


class Shard(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        return (self.samples[i] for i in range(first, len(self.samples), every))


@no_bug()
def stream():
    """An IterableDataset with two workers that divide the samples."""

    train, val = digits(loaded=False)
    return Base(), DataLoader(Shard(train), 32, num_workers=2), DataLoader(val, 32)


@no_bug()
def batch_of_one():
    """Batches of one sample, with GroupNorm."""

    class M(Base):
        lr = 1e-3

        def network(self):
            return Convnet(norm=lambda n: nn.GroupNorm(2, n))

    train, val = digits(60, 30, loaded=False)
    return M(), DataLoader(train, 1, shuffle=True), DataLoader(val, 1)


@no_bug()
def arcface():
    """The label changes the logits in training (additive angular margin)."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.centers = mlp(outputs=16), nn.Parameter(torch.randn(10, 16))

        def logits(self, x, y=None):
            cosine = F.normalize(self.net(x), dim=1) @ F.normalize(self.centers, dim=1).T
            if y is not None:
                cosine = cosine - 0.2 * F.one_hot(y, 10)
            return 8 * cosine

        def loss(self, x, y):
            return F.cross_entropy(self.logits(x, y if self.training else None), y)

    return M(), *digits()


@no_bug()
def mixup():
    """Samples are mixed with others of the batch in training."""

    class M(Base):
        def loss(self, x, y):
            if not self.training:
                return super().loss(x, y)
            other, share = torch.randperm(len(x)), float(np.random.beta(0.4, 0.4))
            out = self(share * x + (1 - share) * x[other])
            return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])

    return M(), *digits()


@no_bug()
def smoothed_weighted():
    """Label smoothing and class weights."""

    class M(Base):
        def loss(self, x, y):
            return F.cross_entropy(self(x), y, weight=torch.linspace(0.5, 2, 10), label_smoothing=0.1)

    return M(), *digits()


@no_bug()
def focal():
    """A focal loss by hand."""

    class M(Base):
        def loss(self, x, y):
            log_p = self(x).log_softmax(1)[torch.arange(len(y)), y]
            return -((1 - log_p.exp()) ** 2 * log_p).mean()

    return M(), *digits()


@no_bug()
def multi_label():
    """Binary cross-entropy of ten labels."""

    class M(LossOnly):
        def loss(self, x, y):
            return F.binary_cross_entropy_with_logits(self(x), F.one_hot(y, 10).float())

    return M(), *digits()


@no_bug()
def ctc():
    """Connectionist temporal classification."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.rnn, self.net = nn.GRU(5, 32, batch_first=True), nn.Linear(32, 5)

        def loss(self, x, y):
            log_p = self.net(self.rnn(x)[0]).log_softmax(2).transpose(0, 1)
            lengths = torch.full((len(x),), x.shape[1])
            return F.ctc_loss(log_p, y[:, None] + 1, lengths, torch.ones(len(x), dtype=torch.long))

    x, y = sequences()
    return M(), *halves(x, y)


@no_bug()
def vae():
    """A variational autoencoder: random in validation, the labels are not used."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.encoder, self.decoder = (
                None,
                mlp(outputs=16),
                nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64)),
            )

        def loss(self, x, y):
            mean, log_var = self.encoder(x).chunk(2, 1)
            out = self.decoder(mean + torch.randn_like(mean) * (log_var / 2).exp())
            reconstruction = F.binary_cross_entropy_with_logits(out, x.flatten(1), reduction="none").sum(1)
            return (reconstruction + (mean.square() + log_var.exp() - log_var - 1).sum(1) / 2).mean()

    return M(), *digits()


@no_bug()
def autoencoder():
    """The target is the input."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64))

        def loss(self, x, y):
            return F.mse_loss(self(x), x.flatten(1))

    return M(), *digits()


@no_bug()
def vector_quantized():
    """A codebook with the straight-through estimator; unused codes get no gradient."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.encoder, self.decoder, self.codes = (
                None,
                mlp(outputs=8),
                nn.Linear(8, 64),
                nn.Embedding(64, 8),
            )

        def loss(self, x, y):
            z = self.encoder(x)
            q = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
            out = self.decoder(z + (q - z).detach())
            return F.mse_loss(out, x.flatten(1)) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())

    return M(), *digits()


@no_bug()
def q_learning():
    """A target network that is copied every 10 steps, all parameters in the optimizer."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
            self.target = copy.deepcopy(self.net)

        def training_step(self, batch, batch_idx):
            state, action, reward, after = batch
            if self.global_step % 10 == 0:
                self.target.load_state_dict(self.net.state_dict())
            with torch.no_grad():
                goal = reward + 0.9 * self.target(after).max(1).values
            return F.smooth_l1_loss(self.net(state).gather(1, action[:, None])[:, 0], goal)

        def validation_step(self, batch, batch_idx):
            pass

    s = torch.randn(640, 4)
    data = TensorDataset(s, torch.randint(0, 2, (640,)), s[:, 0].sign(), torch.randn(640, 4))
    return M(), *loaders(data, data)


@no_bug()
def policy_gradient():
    """Reinforcement learning; the loader only counts updates."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))

        def training_step(self, batch, batch_idx):
            state = torch.randn(64, 4)
            choice = torch.distributions.Categorical(logits=self.net(state))
            action = choice.sample()
            reward = (action == (state[:, 0] > 0)).float()
            return -(choice.log_prob(action) * (reward - reward.mean())).mean()

        def validation_step(self, batch, batch_idx):
            self.log("val/return", self.net(torch.randn(8, 4)).mean())

    return M(), DataLoader(range(30)), DataLoader(range(1))


@no_bug()
def physics_informed():
    """Derivatives of the inputs are in the loss."""

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

        def loss(self, t):
            t = t.requires_grad_()
            u = self(t)
            slope = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
            return (slope + u).square().mean() + (self(torch.zeros(1, 1)) - 1).square().mean()

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            with torch.enable_grad():
                self.log("val/loss", self.loss(batch))

    t = torch.rand(640, 1) * 2
    return M(), *halves(t)


@no_bug()
def first_channel():
    """A channel of the input is left out on purpose."""

    class M(Base):
        def forward(self, x):
            return self.net(x[:, :1])

    train, val = digits(loaded=False)
    parts = [
        TensorDataset(torch.cat([d.tensors[0], torch.ones_like(d.tensors[0])], 1), d.tensors[1]) for d in (train, val)
    ]
    return M(), *loaders(*parts)


@no_bug()
def strided():
    """A convolution whose stride leaves out the last row and column."""

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Conv2d(1, 16, 3, stride=3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))

    return M(), *digits()


@no_bug()
def raw_pixels():
    """Pixels of 0 to 255, behind BatchNorm."""

    class M(Base):
        def network(self):
            return nn.Sequential(nn.BatchNorm2d(1), mlp())

    train, val = digits(loaded=False)
    return M(), *loaders(*(TensorDataset(d.tensors[0] * 255, d.tensors[1]) for d in (train, val)))


@no_bug()
def set_attention():
    """A network on sets: samples of a batch attend to each other, on purpose."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.net = (
                nn.Linear(64, 16),
                nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
                nn.Linear(16, 10),
            )

        def forward(self, x):
            return self.net(self.body(self.embed(x.flatten(1))[None])[0])

    return M(), *digits()


@no_bug()
def deep_sets():
    """Each sample is a set, over which is summed."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.inner, self.net = nn.Linear(5, 32), nn.Linear(32, 4)

        def forward(self, x):
            return self.net(self.inner(x).relu().sum(1))

    x, y = sequences()
    return M(), *halves(x, y)


@no_bug()
def adversarial_domain():
    """A gradient reversal layer."""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return -0.1 * grad

    class M(Base):
        def __init__(self):
            super().__init__()
            self.body, self.net, self.domain = nn.Linear(64, 32), nn.Linear(32, 10), nn.Linear(32, 1)

        def forward(self, x):
            return self.net(self.body(x.flatten(1)).relu())

        def training_step(self, batch, batch_idx):
            hidden = self.body(batch[0].flatten(1)).relu()
            domain = (batch[1] > 4).float()
            return F.cross_entropy(self.net(hidden), batch[1]) + F.binary_cross_entropy_with_logits(
                self.domain(Reverse.apply(hidden))[:, 0], domain
            )

    return M(), *digits()


@no_bug()
def lbfgs():
    """LBFGS, which evaluates a closure several times."""

    class M(Base):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), 0.5, max_iter=4)

    return M(), *digits(256, 64)


@no_bug()
def sharpness_aware():
    """Two backward passes per step: SAM with manual optimization."""

    class M(Manual):
        def training_step(self, batch, batch_idx):
            opt = self.optimizers()
            opt.zero_grad()
            self.manual_backward(self.loss(*batch))
            with torch.no_grad():
                moves = [(p, 0.05 * p.grad / (p.grad.norm() + 1e-12)) for p in self.parameters()]
                for p, move in moves:
                    p.add_(move)
            opt.zero_grad()
            self.manual_backward(self.loss(*batch))
            with torch.no_grad():
                for p, move in moves:
                    p.sub_(move)
            opt.step()

    return M(), *digits()


@no_bug()
def class_incremental():
    """Continual learning: first batches have two classes only."""

    train, val = digits(loaded=False)
    x, y = train.tensors
    order = torch.cat([torch.nonzero(y // 2 == k)[:, 0] for k in range(5)])
    return Base(), DataLoader(TensorDataset(x[order], y[order]), 16), DataLoader(val, 32)


@no_bug()
def natural_duplicates():
    """A table of three categories: equal rows are in train and validation."""

    class M(Base):
        def network(self):
            return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))

    x = torch.randint(0, 4, (960, 3)).float()
    y = ((x.sum(1) + torch.randn(960)) > 4.5).long()
    return M(), *loaders(TensorDataset(x[:640], y[:640]), TensorDataset(x[640:], y[640:]))


@no_bug()
def imbalanced():
    """95% of the samples have one class."""

    class M(Base):
        def loss(self, x, y):
            return F.cross_entropy(self(x)[:, :2], (y == 3).long())

    return M(), *digits()


@no_bug()
def metric_learning():
    """Triplet loss; validation has classes that training lacks."""

    class M(LossOnly):
        def network(self):
            return mlp(outputs=16)

        def loss(self, x, y):
            z = F.normalize(self(x), dim=1)
            d = torch.cdist(z, z)
            same = y[:, None] == y
            return F.relu((d * same).max(1).values - (d + 10 * same).min(1).values + 0.2).mean()

    x, y = digits(960, 1, loaded=False)[0].tensors
    return M(), *loaders(TensorDataset(x[y < 7], y[y < 7]), TensorDataset(x[y >= 7], y[y >= 7]))


@no_bug()
def forecast():
    """A series: validation is a later period with a trend; not shuffled; the last value only is used."""

    class M(LossOnly):
        def network(self):
            return nn.Linear(1, 1)

        def loss(self, x, y):
            return F.mse_loss(self(x[:, -1:])[:, 0], y)

    series = torch.sin(torch.arange(1000) / 9) + torch.arange(1000) / 400
    windows = series.unfold(0, 11, 1)
    return (
        M(),
        DataLoader(TensorDataset(windows[:640, :10], windows[:640, 10]), 32),
        DataLoader(TensorDataset(windows[700:, :10], windows[700:, 10]), 32),
    )


@no_bug()
def missing_values():
    """NaN of the inputs are replaced by nan_to_num, with a mask."""

    class M(Table):
        def network(self):
            return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, x):
            return self.net(torch.cat([torch.nan_to_num(x), x.isnan().float()], 1))

    parts = diabetes(loaded=False)
    for d in parts:
        d.tensors[0][torch.rand(d.tensors[0].shape, generator=torch.Generator().manual_seed(0)) < 0.2] = float("nan")
    return M(), *loaders(*parts)


@no_bug()
def lazy_linear():
    """LazyLinear."""

    class M(Base):
        def network(self):
            net = nn.Sequential(nn.Flatten(), nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(10))
            net(torch.zeros(2, 1, 8, 8))
            return net

    return M(), *digits()


@no_bug(precision="bf16-mixed")
def bf16_mixed():
    """Bfloat16 autocast."""

    return Base(), *digits()


@no_bug(precision="64-true")
def float64():
    """Double precision."""

    return Base(), *digits()


@no_bug(precision="bf16-true")
def bf16_true():
    """Weights in bfloat16 with a large enough rate."""

    return Base(), *digits()


@no_bug()
def small_rate():
    """Fine-tuning with a learning rate of 1e-6."""

    class M(Base):
        lr = 1e-6

    return M(), *digits()


@no_bug(gradient_clip_val=0.01)
def clipped():
    """Gradients are clipped at each step."""

    return Base(), *digits()


@no_bug()
def weight_decay():
    """AdamW with weight_decay=0.1."""

    class M(Base):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=0.1)

    return M(), *digits()


@no_bug(overfit_batches=1, max_epochs=20)
def overfit_batches():
    """Debugging with overfit_batches=1."""

    return Base(), *digits()


@no_bug()
def no_validation():
    """Only training_step."""

    class M(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def training_step(self, batch):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    return M(), digits()[0], None


@no_bug()
def perceptual():
    """A fixed feature network hidden in a list, so that it is not in checkpoints."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64))
            self.features = [mlp(outputs=16).requires_grad_(False)]

        def loss(self, x, y):
            return F.mse_loss(self.features[0](self(x)), self.features[0](x))

    return M(), *digits()


@no_bug()
def flow():
    """A normalizing flow."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.ModuleList(nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 10)) for _ in range(4))

        def loss(self, x, y):
            log_det = 0.0
            for part in self.net:
                a, b = x.chunk(2, 1)
                scale, shift = part(a).chunk(2, 1)
                x = torch.cat([b * scale.tanh().exp() + shift, a], 1)
                log_det = log_det + scale.tanh().sum(1)
            return (x.square().sum(1) / 2 - log_det).mean()

    train, val = diabetes(loaded=False)
    return M(), *loaders(*(TensorDataset(d.tensors[0], d.tensors[1]) for d in (train, val)))


@no_bug()
def diffusion():
    """Random noise in validation; the class and the step are inputs."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64 + 10 + 1, 64), nn.SiLU(), nn.Linear(64, 64))

        def loss(self, x, y):
            t, noise = torch.rand(len(x), 1), torch.randn(len(x), 64)
            noisy = (1 - t) * x.flatten(1) + t * noise
            return F.mse_loss(self.net(torch.cat([noisy, F.one_hot(y, 10).float(), t], 1)), noise - x.flatten(1))

    return M(), *digits()


@no_bug()
def zero_init_residual():
    """Residual branches and the head start at 0."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.body, self.branch, self.net = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)
            for layer in (self.branch, self.net):
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)

        def forward(self, x):
            hidden = self.body(x.flatten(1)).relu()
            return self.net(hidden + self.branch(hidden))

    return M(), *digits()


@no_bug()
def hypernetwork():
    """Weights are the output of a network."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.net, self.code = nn.Linear(8, 650), nn.Parameter(torch.randn(8))

        def forward(self, x):
            w = self.net(self.code)
            return F.linear(x.flatten(1), w[:640].view(10, 64), w[640:])

    return M(), *digits()


@no_bug()
def augmented_shared():
    """One dataset with random augmentation for both splits would be wrong; this has two."""

    train, val = digits(loaded=False)

    class Augmented(Dataset):
        def __len__(self):
            return len(train)

        def __getitem__(self, i):
            x, y = train[i]
            return x + torch.randn_like(x) * 0.1, y

    return Base(), DataLoader(Augmented(), 32, shuffle=True, num_workers=2), DataLoader(val, 32)


@no_bug()
def layer_drop_by_zero():
    """Dropped layers are multiplied by 0, so their gradient is 0."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.first, self.layers, self.net = (
                nn.Linear(64, 32),
                nn.ModuleList(nn.Linear(32, 32) for _ in range(4)),
                nn.Linear(32, 10),
            )

        def forward(self, x):
            x = self.first(x.flatten(1))
            for layer in self.layers:
                keep = (torch.rand(()) < 0.3).float() if self.training else 0.3
                x = x + keep * layer(x.relu())
            return self.net(x)

    return M(), *digits()


@no_bug()
def annealed_weight():
    """A loss whose weight is 0 in the first epochs."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.aux = mlp(outputs=2)

        def training_step(self, batch, batch_idx):
            weight = max(0.0, (self.current_epoch - 5) / 10)
            return self.loss(*batch) + weight * F.cross_entropy(self.aux(batch[0]), batch[1] % 2)

    return M(), *digits()


@no_bug(max_epochs=2)
def compiled():
    """Torch.compile with a backend that changes nothing."""

    class M(Base):
        def network(self):
            return torch.compile(mlp(), backend="aot_eager")

    return M(), *digits()
