"""A diffusion model of pictures of 8 x 8 pixels, which draws the class that it is asked for.

Source: Ho, Jain and Abbeel, Denoising Diffusion Probabilistic Models, 2020; the schedule: Nichol and Dhariwal, Improved
Denoising Diffusion Probabilistic Models, 2021.
"""

import math

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, pad


class Diffusion(L.LightningModule):
    """A network that finds the noise in a picture, given the class and the amount of noise.

    Args:
        hidden_size: Units of the hidden layers.
        num_steps: Number of amounts of noise.
        lr: Learning rate of Adam.
    """

    def __init__(self, hidden_size: int = 256, num_steps: int = 100, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.step, self.label = nn.Embedding(num_steps, hidden_size), nn.Embedding(10, hidden_size)
        self.first, self.last = nn.Linear(64, hidden_size), nn.Linear(hidden_size, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden_size), nn.Linear(hidden_size, hidden_size), nn.SiLU()) for _ in range(4)
        )
        times = torch.linspace(0, 1, num_steps + 1)[1:]
        self.register_buffer("signal", (times * math.pi / 2 * 0.99).cos().square())  # from nearly 1 to nearly 0

    def forward(self, noisy: Tensor, step: Tensor, label: Tensor) -> Tensor:
        hidden = self.first(noisy)
        for block in self.blocks:
            hidden = hidden + block(hidden + self.step(step) + self.label(label))
        return self.last(hidden)

    def loss(self, batch: tuple[Tensor, Tensor], stage: str) -> Tensor:
        """Return the mean squared error of the noise; 1 if none is found."""
        pixels, noise = batch[0].flatten(1) / 127.5 - 1, torch.randn(len(batch[0]), 64, device=self.device)
        step = torch.randint(len(self.signal), (len(pixels),), device=self.device)
        signal = self.signal[step, None]
        loss = mse_loss(self(signal.sqrt() * pixels + (1 - signal).sqrt() * noise, step, batch[1]), noise)
        self.log(f"{stage}/loss", loss)
        return loss

    @torch.no_grad()
    def sample(self, label: Tensor) -> Tensor:
        """Return pictures of shape (N, 1, 8, 8) with pixels from 0 to 1, beginning with noise."""
        x = torch.randn(len(label), 64, device=self.device)
        before = torch.cat([self.signal.new_ones(1), self.signal[:-1]])
        for step in reversed(range(len(self.signal))):
            signal, ratio = self.signal[step], self.signal[step] / before[step]
            noise = self(x, torch.full_like(label, step), label)
            clean = ((x - (1 - signal).sqrt() * noise) / signal.sqrt()).clamp(-1, 1)
            x = (before[step].sqrt() * (1 - ratio) * clean + ratio.sqrt() * (1 - before[step]) * x) / (1 - signal)
            x += ((1 - ratio) * (1 - before[step]) / (1 - signal)).sqrt() * torch.randn_like(x)
        return (x.view(-1, 1, 8, 8) + 1) / 2

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.loss(batch, "train")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.loss(batch, "val")
        if batch_idx == 0:
            samples = self.sample(torch.arange(40, device=self.device) % 10)
            samples = pad(samples, (1, 1, 1, 1)).view(4, 10, 10, 10)
            self.logger.log_image(
                "val/samples", [samples.transpose(1, 2).reshape(1, 40, 100)]
            )  # a row of 0 to 9, four times

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.loss(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.hparams.lr)
