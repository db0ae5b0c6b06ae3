"""A variational autoencoder of pictures of 8 x 8 pixels.

Source: Kingma and Welling, Auto-Encoding Variational Bayes, 2013.
"""

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy


class VAE(L.LightningModule):
    """Pixels are Bernoulli variables, latent variables are normal.

    Args:
        latent_size: Number of latent variables.
        hidden_size: Units of the hidden layers.
        lr: Learning rate of Adam.
    """

    def __init__(self, latent_size: int = 16, hidden_size: int = 256, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            *(nn.Linear(64, hidden_size), nn.ReLU()),
            *(nn.Linear(hidden_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, 2 * latent_size)),
        )
        self.decoder = nn.Sequential(
            *(nn.Linear(latent_size, hidden_size), nn.ReLU()),
            *(nn.Linear(hidden_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, 64)),
        )

    def losses(self, batch: tuple[Tensor, Tensor], stage: str) -> tuple[Tensor, Tensor]:
        """Return the negative evidence lower bound in nats, and the reconstructed pixels, of shape (B, 64)."""
        pixels = batch[0].flatten(1) / 255
        mean, log_variance = self.encoder(pixels).chunk(2, dim=1)
        logits = self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp())
        reconstruction = cross_entropy(logits, pixels, reduction="none").sum(1)
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(1) / 2
        loss = (reconstruction + divergence).mean()
        self.log_dict({f"{stage}/loss": loss, f"{stage}/divergence": divergence.mean()})
        return loss, logits.sigmoid()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.losses(batch, "train")[0]

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        _, pixels = self.losses(batch, "val")
        if batch_idx == 0:
            pairs = torch.stack([batch[0][:18].flatten(1) / 255, pixels[:18]], dim=1)  # (18, 2, 64)
            self.logger.log_image("val/reconstructed", list(pairs.view(-1, 1, 8, 8)))
            latent = torch.randn(36, self.hparams.latent_size, device=self.device)
            self.logger.log_image("val/samples", list(self.decoder(latent).sigmoid().view(-1, 1, 8, 8)))

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.losses(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.hparams.lr)
