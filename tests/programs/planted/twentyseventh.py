"""Optimizers that undo each other, hooks of other tools, ramps that begin again, channels that a reshape moves."""

import lightning as L
import torch
from programs import Base, Causal, Convnet, LossOnly, Manual, bug, digits, halves, tokens
from torch import nn
from torch.nn import functional as F


class Ring(Manual):
    """A GAN of points on a ring, whose optimizers get the given parts."""

    detached = True

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def of_generator(self):
        return self.net.parameters()

    def of_critic(self):
        return self.critic.parameters()

    def score(self, x, is_real):
        out = self.critic(x)
        return F.binary_cross_entropy_with_logits(out, torch.full_like(out, float(is_real)))

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        real = batch[0]
        fake = self.net(torch.randn(len(real), 4))
        loss = self.score(real, is_real=True) + self.score(fake.detach() if self.detached else fake, is_real=False)
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.generate(first, len(real))

    def generate(self, optimizer, count):
        optimizer.zero_grad()
        self.manual_backward(self.score(self.net(torch.randn(count, 4)), is_real=True))
        optimizer.step()

    def configure_optimizers(self):
        first = torch.optim.Adam(self.of_generator(), 5e-4, betas=(0.0, 0.99))
        return first, torch.optim.Adam(self.of_critic(), 5e-4, betas=(0.0, 0.99))


def ring():
    g = torch.Generator().manual_seed(0)
    angle = 6.2832 * torch.rand(640, generator=g)
    return halves(torch.stack([1.5 + angle.cos(), angle.sin() - 0.5], 1))


@bug("foreign-gradient")
def generator_trains_its_critic():
    class Net(Ring):
        def of_generator(self):
            return self.parameters()

    return Net(), *ring()


@bug("foreign-gradient")
def critic_trains_its_generator():
    class Net(Ring):
        detached = False

        def of_critic(self):
            return self.parameters()

    return Net(), *ring()


@bug("gradients-lost")
def optimizers_of_a_gan_are_exchanged():
    class Net(Ring):
        def configure_optimizers(self):
            return super().configure_optimizers()[::-1]

    return Net(), *ring()


class Averaged(L.Callback):
    """Validates a moving average of the weights."""

    def on_train_start(self, trainer, pl_module):
        self.average = {n: p.detach().clone() for n, p in pl_module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for n, p in pl_module.named_parameters():
            self.average[n].lerp_(p, 0.05)

    @torch.no_grad()
    def on_validation_start(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.trained = {n: p.clone() for n, p in pl_module.named_parameters()}
            for n, p in pl_module.named_parameters():
                p.copy_(self.average[n])


@bug("weights-replaced", callbacks=lambda: [Averaged()])
def average_stays_after_validation():
    return Base(), *digits()


@bug("weights-replaced")
def average_stays_as_train_is_not_called():
    class Net(Base):
        """Exchanges its weights and their average in train() and eval(), of which Lightning calls eval() only."""

        def on_train_start(self):
            self.average, self.kept = [p.detach().clone() for p in self.parameters()], None

        def on_train_batch_end(self, outputs, batch, batch_idx):
            for mean, p in zip(self.average, self.parameters(), strict=True):
                mean.lerp_(p.detach(), 0.05)

        def train(self, mode=True):
            with torch.no_grad():
                if not mode and hasattr(self, "average"):
                    self.kept = [p.clone() for p in self.parameters()]
                    for mean, p in zip(self.average, self.parameters(), strict=True):
                        p.copy_(mean)
                elif mode and getattr(self, "kept", None) is not None:
                    for value, p in zip(self.kept, self.parameters(), strict=True):
                        p.copy_(value)
                    self.kept = None
            return super().train(mode)

        def eval(self):
            return self.train(False)

    return Net(), *digits()


class Thaws(L.Callback):
    """Trains the head alone at first."""

    def on_fit_start(self, trainer, pl_module):
        pl_module.net[0].requires_grad_(False)

    def on_epoch_begin(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            pl_module.net[0].requires_grad_(True)


@bug("misspelled-hook", callbacks=lambda: [Thaws()])
def callback_has_a_hook_of_keras():
    return Base(), *digits()


class Doubles(L.LightningDataModule):
    """Digits, which are scaled where they are on the device."""

    def train_dataloader(self):
        return digits()[0]

    def val_dataloader(self):
        return digits()[1]

    def on_after_batch_transferred(self, batch, dataloader_idx):
        return [2 * batch[0] - 1, batch[1]]


@bug("misspelled-hook")
def data_module_has_a_hook_of_another_name():
    return Base(), Doubles(), None


@bug("ramp-restarts")
def warm_up_counts_the_batches_of_an_epoch():
    class Net(Base):
        def on_train_batch_start(self, batch, batch_idx):
            step = batch_idx + 1
            for group in self.optimizers().param_groups:
                group["lr"] = self.lr * min(1.0, step / 30)

    return Net(), *digits()


class Coded(LossOnly):
    """A VAE of digits."""

    def network(self):
        return nn.Linear(8, 64)

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(64, 16)

    def weight(self, batch_idx):
        return 0.1

    def training_step(self, batch, batch_idx):
        x = batch[0].flatten(1)
        mean, log_var = self.encoder(x).chunk(2, 1)
        out = self.net(mean + torch.randn_like(mean) * (0.5 * log_var).exp())
        divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
        return F.mse_loss(out, x, reduction="none").sum(1).mean() + self.weight(batch_idx) * divergence

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))


@bug("ramp-restarts")
def weight_of_the_divergence_counts_the_batches():
    class Net(Coded):
        def weight(self, batch_idx):
            return min(1.0, batch_idx / 500)

    return Net(), *digits()


@bug("ramp-restarts")
def rate_rises_until_a_warm_up_of_each_epoch():
    class Net(Base):
        warmup = 40

        def on_train_batch_start(self, batch, batch_idx):
            for group in self.optimizers().param_groups:
                group["lr"] = self.lr * batch_idx / self.warmup if batch_idx < self.warmup else self.lr

    return Net(), *digits()


@bug("ramp-restarts")
def weight_is_whole_behind_a_number_of_batches():
    class Net(Coded):
        def weight(self, batch_idx):
            return 1.0 if batch_idx > 300 else batch_idx / 300

    return Net(), *digits()


@bug("misspelled-hook")
def data_module_has_no_hook_for_validation():
    class Data(L.LightningDataModule):
        def train_dataloader(self):
            return digits()[0]

        def val_dataloaders(self):
            return digits()[1]

    return Base(), Data(), None


def tiles(count=640, size=12):
    """Bytes (N, H, W, 3) of one color each, with a line across or down, and which of the two it is."""
    g = torch.Generator().manual_seed(0)
    colors = torch.tensor([[60.0, 120, 50], [170, 150, 100], [110, 90, 180]])
    x = colors[torch.randint(0, 3, (count,), generator=g)][:, None, None].repeat(1, size, size, 1)
    y = torch.randint(0, 2, (count,), generator=g)
    for n in range(count):
        at = int(torch.randint(2, size - 3, (1,), generator=g))
        (x[n] if y[n] else x[n].transpose(0, 1))[at : at + 2] = torch.tensor([40.0, 70, 140])
    return (x + 30 * torch.randn(x.shape, generator=g)).clamp(0, 255) / 127.5 - 1, y


class Lined(LossOnly):
    """Tells lines across from lines down."""

    def network(self):
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *[*Convnet(2)][1:])


@bug("reshape-not-transpose")
def pictures_of_few_colors_are_reshaped():
    x, y = tiles()
    return Lined(), *halves(x.reshape(len(x), 3, 12, 12), y)


@bug("reshape-not-transpose")
def planes_are_read_as_pixels():
    x, y = tiles()
    planes = x.permute(0, 3, 1, 2).reshape(len(x), 12, 12, 3)
    return Lined(), *halves(planes.permute(0, 3, 1, 2), y)


def waves(channels=4, times=40):
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (640,), generator=g)
    phase = 6.28 * torch.rand(640, 1, channels, generator=g)
    x = torch.sin(torch.arange(times)[None, :, None] * (0.15 + 0.1 * y[:, None, None]) + phase)
    return x + 0.2 * torch.randn(x.shape, generator=g), y


class Waves(LossOnly):
    """Classes of series (N, C, T)."""

    def network(self):
        return nn.Sequential(nn.Conv1d(4, 16, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 3))


@bug("reshape-not-transpose")
def series_are_reshaped_before_the_dataset():
    x, y = waves()
    return Waves(), *halves(x.reshape(len(x), 4, 40), y)


class Continued(Causal):
    """Also tells, in validation, how often the token after the first half is right."""

    def loss(self, x):
        return F.cross_entropy(self(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))
        self.log("val/right", (self(batch[:, :8])[:, -1].argmax(-1) == batch[:, 8]).float().mean())


@bug("future-leak")
def no_mask_but_continues_a_prefix():
    class Net(Continued):
        causal = False

    return Net(), *halves(tokens())


@bug("future-leak")
def no_mask_but_generates():
    class Net(Continued):
        causal = False

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.loss(batch))
            out = batch[:, :1]
            for _ in range(5):
                out = torch.cat([out, self(out)[:, -1].argmax(-1, keepdim=True)], 1)
            self.log("val/right", (out == batch[:, :6]).float().mean())

    return Net(), *halves(tokens())
