"""Time series: how does a chaotic system go on?

Source: Lorenz, Deterministic Nonperiodic Flow, 1963.
"""

from typing import Any

import lightning as L
import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from boltcutter import DataModule, Splits


class Lorenz(DataModule):
    """The first coordinate of the Lorenz system, with noise; the splits are successive periods of it.

    Args:
        seen: Number of values that are known.
        horizon: Number of values to forecast.
        interval: Seconds between two values.
        options: Arguments of ``DataModule``.
    """

    def __init__(self, seen: int = 60, horizon: int = 30, interval: float = 0.05, **options: Any) -> None:
        super().__init__(**options)
        self.seen, self.horizon, self.interval = seen, horizon, interval

    def load(self) -> Splits:
        def slope(_: float, p: np.ndarray) -> list[float]:
            return [10 * (p[1] - p[0]), p[0] * (28 - p[2]) - p[1], p[0] * p[1] - 8 / 3 * p[2]]

        times = np.arange(6000) * self.interval
        values = solve_ivp(slope, (0, times[-1]), [1, 1, 1], t_eval=times, rtol=1e-8).y[0] / 8
        values += np.random.default_rng(self.seed).normal(scale=0.02, size=len(values))
        windows = torch.tensor(values, dtype=torch.float32).unfold(0, self.seen + self.horizon, 1)
        parts = windows[:4000], windows[4100:4900:5], windows[5000::5]
        return Splits(*(TensorDataset(part[:, : self.seen], part[:, self.seen :]) for part in parts))


class Forecaster(L.LightningModule):
    """A GRU, of whose last state all values of the horizon are a linear function."""

    def __init__(self, horizon: int, hidden_size: int = 64, lr: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network, self.last = nn.GRU(1, hidden_size, batch_first=True), nn.Linear(hidden_size, horizon)

    def forward(self, seen: Tensor) -> Tensor:
        return seen[:, -1:] + self.last(self.network(seen.unsqueeze(-1))[0][:, -1])  # (B, horizon)

    def step(self, batch: tuple[Tensor, Tensor], stage: str) -> tuple[Tensor, Tensor]:
        """Log the error, and how much smaller it is than that of a forecast that nothing will change."""
        seen, future = batch
        forecast = self(seen)
        loss, constant = mse_loss(forecast, future), mse_loss(seen[:, -1:].expand_as(future), future)
        self.log_dict({f"{stage}/loss": loss, f"{stage}/skill": 1 - loss / constant})
        return loss, forecast

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.step(batch, "train")[0]

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.step(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"predictions": self.step(batch, "test")[1], "targets": batch[1]}  # which the report shows

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.hparams.lr)
