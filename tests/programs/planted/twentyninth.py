"""Functions of the file that initialize, values that manual optimization keeps."""

import torch
from programs import Manual, bug, digits, loaders
from programs.planted.twentyeighth import Gallery, Pretrained, Words
from programs.planted.twentyfifth import Policy, states
from torch import nn
from torch.nn import functional as F


def init_words(layer):
    if isinstance(layer, nn.Embedding):
        nn.init.normal_(layer.weight, std=0.02)


@bug("loads-nothing")
def vectors_are_initialized_away_by_a_function():
    class Net(Pretrained):
        def __init__(self):
            super().__init__()
            self.words.weight.data.copy_(torch.eye(24, 16))
            self.apply(init_words)

    train = Words(0)
    return Net(), *loaders(train, Words(1, train.vocab))


class ByHand(Gallery, Manual):
    """Steps its optimizer by hand."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(x), y))
        optimizer.step()


@bug("cached-value")
def gallery_of_manual_optimization_is_kept():
    return ByHand(), *digits(batch=20)


class Reinforce(Policy):
    """Adds up its rewards where it needs them."""

    gamma = 0.9

    def loss(self, x):
        policy = torch.distributions.Categorical(logits=self.net(x))
        action = policy.sample()
        rewards = (action == (x[..., 0] > 0)).float()
        returns, total = [], torch.zeros(len(x))
        for t in range(rewards.shape[1]):
            total = rewards[:, t] + self.gamma * total
            returns.append(total)
        returns = torch.stack(returns, 1)
        return -(policy.log_prob(action) * (returns - returns.mean(0))).mean()


@bug("returns-of-past")
def returns_within_the_step_are_those_of_the_past():
    return Reinforce(), *states()
