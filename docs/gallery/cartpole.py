"""Reinforcement learning by an actor and a critic.

Source: Barto, Sutton and Anderson, Neuronlike Adaptive Elements That Can Solve Difficult Learning Control Problems,
1983; Mnih et al., Asynchronous Methods for Deep Reinforcement Learning, 2016.
"""

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader


def push(state: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return states (place, speed, angle, angular speed), shape (N, 4), after 0.02 s, and whether the pole fell."""
    _, speed, angle, turning = state.unbind(1)
    force, sine, cosine = 20.0 * right - 10, angle.sin(), angle.cos()
    common = (force + 0.05 * turning.square() * sine) / 1.1
    angular = (9.8 * sine - cosine * common) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
    linear = common - 0.05 * angular * cosine / 1.1
    state = state + 0.02 * torch.stack([speed, linear, turning, angular], dim=1)
    return state, (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.21)


def start(count: int) -> Tensor:
    return torch.rand(count, 4) * 0.1 - 0.05


class Agent(L.LightningModule):
    """A policy, and the value of states; each update is after ``num_steps`` in each environment."""

    def __init__(
        self, num_environments: int = 64, num_steps: int = 16, lr: float = 3e-3, discount: float = 0.98
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.policy, self.value = (nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, n)) for n in (2, 1))
        self.register_buffer("state", start(num_environments))  # in checkpoints, so a resumed run goes on with it

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(100))  # updates in an epoch

    def val_dataloader(self) -> DataLoader:
        return DataLoader(range(1))

    def training_step(self, batch: Tensor) -> Tensor:
        steps = []
        for _ in range(self.hparams.num_steps):
            state = self.state
            choice = Categorical(logits=self.policy(state), validate_args=False)
            action = choice.sample()
            with torch.no_grad():
                after, fell = push(state, action)
                self.state = torch.where(fell[:, None], start(len(after)).to(after), after)
            steps.append((self.value(state)[:, 0], choice.log_prob(action), choice.entropy(), fell))
        values, log_probs, entropies, falls = (torch.stack(found) for found in zip(*steps, strict=True))
        returned, returns = self.value(self.state)[:, 0].detach(), []
        for fell in reversed(falls):
            returned = 0.02 + self.hparams.discount * returned * ~fell  # 1 for a pole that never falls
            returns.insert(0, returned)
        advantages = (torch.stack(returns) - values).detach()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-3)
        self.log("train/entropy", entropies.mean())
        return mse_loss(values, torch.stack(returns)) - (log_probs * advantages + 0.01 * entropies).mean()

    def validation_step(self, batch: Tensor) -> None:
        state, standing = start(100).to(self.device), torch.ones(100, dtype=torch.bool, device=self.device)
        lengths = torch.zeros(100, device=self.device)
        for _ in range(500):
            state, fell = push(state, self.policy(state).argmax(1))
            standing &= ~fell
            lengths += standing
        self.log("val/return", lengths.mean())  # 500 if no pole falls within ten seconds

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.hparams.lr)
