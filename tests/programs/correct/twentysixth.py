"""The programs of ``planted/twentyfifth.py`` without their bugs, and what looks like them."""

import math

import torch
from programs import LossOnly, digits, no_bug
from programs.planted.twentyfifth import (
    Deep,
    Gaps,
    Margin,
    Next,
    Penalized,
    Policy,
    Residual,
    Tasks,
    Warm,
    Wind,
    Words,
    gaps,
    houses,
    items,
    states,
    texts,
    winds,
)
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, MultiplicativeLR


def returns_to_come(rewards, gamma=0.9):
    """Discounted sums of the rewards (N, T) of each step, and of those that follow."""
    returns, total = [], torch.zeros(len(rewards))
    for r in rewards.flip(1).unbind(1):
        total = r + gamma * total
        returns.append(total)
    return torch.stack(returns[::-1], 1)


@no_bug()
def returns_of_samples():
    class Net(Policy):
        def returns_of(self, rewards):
            return returns_to_come(rewards)

    return Net(), *states()


def returns_of_episodes(rewards, gamma=0.9):
    """Of an array (T, N), scaled by those of all samples."""
    returns = torch.zeros_like(rewards)
    for t in reversed(range(len(rewards))):
        returns[t] = rewards[t] + (gamma * returns[t + 1] if t + 1 < len(rewards) else 0)
    return (returns - returns.mean()) / (returns.std() + 1e-6)


@no_bug()
def returns_with_time_first():
    class Net(Policy):
        def returns_of(self, rewards):
            return returns_of_episodes(rewards.T).T

    return Net(), *states()


@no_bug()
def errors_are_masked():
    class Net(Gaps):
        def loss(self, x, y, observed):
            return (F.l1_loss(self(x), y, reduction="none") * observed).sum() / observed.sum()

    return Net(), *gaps()


@no_bug()
def missing_values_are_the_mean_of_what_is_forecast():
    class Net(Gaps):
        def loss(self, x, y, observed):
            out = self(x)
            filled = observed * y + (1 - observed) * out.mean()
            smooth = torch.where(observed.bool(), out, (out - out.roll(1, 1)).mean())
            return F.mse_loss(out, filled) + 1e-3 * smooth.square().mean()

    return Net(), *gaps()


@no_bug()
def each_task_has_a_weight():
    class Net(Gaps):
        def loss(self, x, y, observed):
            error = (observed * (self(x) - y).abs()).sum() / observed.sum()
            return (error * torch.tensor([1.0, 0.0, 0.5, 0.0])).sum()

    return Net(), *gaps()


@no_bug()
def warm_up_of_the_initial_rate():
    class Net(Warm):
        def change(self, group, step):
            group["lr"] = self.lr * min(1.0, (step + 1) / self.warm_up)

    return Net(), *digits()


@no_bug()
def rate_is_set_and_multiplied():
    class Net(Warm):
        def change(self, group, step):
            group["lr"] = self.lr
            group["lr"] *= min(1.0, (step + 1) / self.warm_up)

    return Net(), *digits()


@no_bug()
def rate_falls_by_a_constant():
    class Net(Warm):
        def change(self, group, step):
            group["lr"] *= 0.97

    return Net(), *digits()


@no_bug()
def rate_is_multiplied_by_a_ratio():
    class Net(Warm):
        def factor(self, step):
            return 0.5 * (1 + math.cos(math.pi * step / 60))

        def change(self, group, step):
            group["lr"] *= self.factor(step + 1) / self.factor(step)

    return Net(), *digits()


@no_bug()
def cosine_by_lambda():
    class Net(LossOnly):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(step, 60) / 60)))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Net(), *digits()


@no_bug()
def linear_by_factors():
    class Net(LossOnly):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = MultiplicativeLR(optimizer, lambda step: (80 - step) / (81 - step))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Net(), *digits()


@no_bug()
def angles_are_wrapped():
    class Net(Wind):
        def error(self, out, angle):
            error = torch.atan2(out[:, 1], out[:, 0]) - angle
            return (torch.remainder(error + math.pi, 2 * math.pi) - math.pi).abs().mean()

    return Net(), *winds()


@no_bug()
def angles_are_wrapped_by_the_lesser_way():
    class Net(Wind):
        def error(self, out, angle):
            error = (torch.atan2(out[:, 1], out[:, 0]) % (2 * math.pi) - angle).abs()
            other = (torch.atan2(out[:, 1], out[:, 0]) - angle).abs()
            return torch.minimum(error, 2 * math.pi - error).mean() + (1 - torch.cos(other)).mean()

    return Net(), *winds()


@no_bug()
def angles_are_small():
    class Net(Wind):
        def error(self, out, angle):
            return (torch.atan2(out[:, 1], out[:, 0]) - angle / 4).abs().mean()

        def loss(self, x, angle):
            return super().loss(x, angle / 4)

    return Net(), *winds(begin=-math.pi)


@no_bug()
def best_items_are_numbered_from_one():
    class Net(Next):
        def best(self, scores):
            return super().best(scores) + 1

    return Net(), *items()


@no_bug()
def classes_without_the_background():
    class Net(Next):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(16, 22)

        def forward(self, x):
            return super().forward(x)[:, 1:]

        def best(self, scores):
            return scores.topk(5, dim=-1).indices

    return Net(), *items()


@no_bug()
def margin_is_subtracted():
    class Net(Margin):
        def logits(self, cosine, y):
            return 10 * (cosine - 0.2 * F.one_hot(y, 10))

    return Net(), *digits()


@no_bug()
def angle_is_made_larger():
    class Net(Margin):
        def logits(self, cosine, y):
            rows, cosine = torch.arange(len(y)), cosine.clone()
            cosine[rows, y] = torch.cos(torch.acos(cosine[rows, y].clamp(-0.99, 0.99)) + 0.3)
            return 10 * cosine

    return Net(), *digits()


@no_bug()
def logits_are_adjusted():
    class Net(Margin):
        def logits(self, cosine, y):
            return 10 * cosine + torch.bincount(y, minlength=10).add(1).log()

    return Net(), *digits()


@no_bug()
def words_are_numbered_behind_padding():
    class Net(Words):
        first = 1

    return texts(Net())


@no_bug()
def variances_are_held():
    class Net(Tasks):
        def weighted(self, errors):
            return (torch.exp(-self.log_vars) * errors + self.log_vars).sum()

    return Net(), *houses()


@no_bug()
def shares_add_up_to_one():
    class Net(Tasks):
        def weighted(self, errors):
            return (torch.softmax(self.log_vars, 0) * errors).sum() + 0.1 * self.log_vars.square().sum()

    return Net(), *houses()


@no_bug()
def variance_of_predictions_is_learned():
    class Net(Tasks):
        def errors(self, x, y, sold):
            out = self.net(x)
            error = (out - torch.stack([y, sold], 1)).square().mean(0)
            return 0.5 * error

        def weighted(self, errors):
            deviation = F.softplus(self.log_vars) + 1e-3
            return (errors / deviation**2 + deviation.log()).sum()

    return Net(), *houses()


@no_bug()
def outputs_have_a_learned_scale():
    class Net(Tasks):
        def errors(self, x, y, sold):
            out = torch.exp(-self.log_vars) * self.net(x)
            return torch.stack([(out[:, 0] - y).square().mean(), (out[:, 1] - sold).abs().mean()])

        def weighted(self, errors):
            return errors.sum()

    return Net(), *houses()


@no_bug()
def input_of_a_block_is_kept():
    class Block(Residual):
        def forward(self, x):
            skipped = x
            x = F.relu(self.one(x))
            x = self.other(x)
            return x + skipped

    class Net(Deep):
        block = Block

    return Net(), *digits()


@no_bug()
def blocks_are_added_in_turn():
    class Block(Residual):
        def forward(self, x):
            h = self.one(x)
            x = x + h
            h = F.relu(self.other(x))
            return x + h

    class Net(Deep):
        block = Block

    return Net(), *digits()


@no_bug()
def ramp_of_fractions():
    class Net(Penalized):
        def weight(self):
            return min(1.0, self.current_epoch / self.warm_up)

    return Net(), *digits()


@no_bug()
def ramp_is_over_at_once():
    class Net(Penalized):
        def weight(self):
            return min(1.0, (self.current_epoch + 1) // 1)

    return Net(), *digits()


@no_bug()
def weight_falls_in_stairs():
    class Net(Penalized):
        def weight(self):
            factor = 0.5 ** (self.current_epoch // 10)
            stage = min(2, self.current_epoch // 10)
            return factor / (1 + stage)

    return Net(), *digits()
