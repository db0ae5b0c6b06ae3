"""A generative adversarial network for pictures of 8 x 8 pixels.

Source: Goodfellow et al., Generative Adversarial Nets, 2014; the distance: Heusel et al., GANs Trained by a Two
Time-Scale Update Rule Converge to a Local Nash Equilibrium, 2017, here of pixels, as the digits are small.
"""

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy


def frechet_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the Fréchet distance of the normal distributions that fit two samples of shape (N, pixels) best."""
    a, b = a.double(), b.double()
    mixed = torch.linalg.eigvals(a.T.cov() @ b.T.cov()).real.clamp(min=0).sqrt().sum()
    return (a.mean(0) - b.mean(0)).square().sum() + a.T.cov().trace() + b.T.cov().trace() - 2 * mixed


class GAN(L.LightningModule):
    """Two networks with an optimizer each.

    Args:
        latent_size: Number of random numbers that a picture is made of.
        lr: Learning rate of both optimizers.
    """

    def __init__(self, latent_size: int = 32, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            *(nn.Linear(latent_size, 256), nn.BatchNorm1d(256), nn.ReLU()),
            *(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 64), nn.Sigmoid()),
        )
        self.discriminator = nn.Sequential(
            *(nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
            *(nn.Linear(256, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1)),
        )

    def sample(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, self.hparams.latent_size, device=self.device))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        real = batch[0].flatten(1) / 255
        for optimizer, name in zip(self.optimizers(), ("generator", "discriminator"), strict=True):
            fake = self.sample(len(real))
            judged = self.discriminator(fake)
            if name == "generator":
                loss = cross_entropy(judged, torch.ones_like(judged))
            else:
                judged, truth = self.discriminator(torch.cat([fake.detach(), real])), torch.ones(2 * len(real), 1)
                truth[: len(real)] = 0
                loss = cross_entropy(judged, truth.to(judged))
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log(f"train/{name}_loss", loss)

    def on_validation_epoch_start(self) -> None:
        self.real: list[Tensor] = []

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.real.append(batch[0].flatten(1) / 255)

    def on_validation_epoch_end(self) -> None:
        samples = self.sample(1000)
        self.log("val/distance", frechet_distance(samples, torch.cat(self.real)))
        self.logger.log_image("val/samples", list(samples[:36].view(-1, 1, 8, 8)))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        networks = self.generator, self.discriminator
        return [torch.optim.Adam(network.parameters(), self.hparams.lr, betas=(0.5, 0.999)) for network in networks]
