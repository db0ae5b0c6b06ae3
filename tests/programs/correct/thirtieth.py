"""The programs of ``planted/twentyninth.py`` without their bugs, and what looks like them."""

import random

import torch
from programs import digits, loaders, no_bug
from programs.planted import twentyninth as planted
from programs.planted.twentyeighth import Bag, Pretrained, Words
from programs.planted.twentyfifth import Policy, states
from torch import nn


class Places(Words):
    """Also knows in which row of its own table what is known of a word stands."""

    def __init__(self, seed, vocab=None):
        super().__init__(seed, vocab)
        names = [f"station {n}" for n in range(60)]
        random.Random(seed).shuffle(names)
        self.rows_of = {name: n for n, name in enumerate(names)}


@no_bug()
def rows_of_a_table_differ_between_splits():
    train = Places(0)
    return Bag(), *loaders(train, Places(1, train.vocab))


@no_bug()
def vectors_are_set_after_a_function():
    class Net(Pretrained):
        def __init__(self):
            super().__init__()
            self.apply(planted.init_words)
            self.words.weight.data.copy_(torch.eye(24, 16))

    train = Words(0)
    return Net(), *loaders(train, Words(1, train.vocab))


def init_linear(layer):
    if isinstance(layer, nn.Linear):
        nn.init.zeros_(layer.bias)


@no_bug()
def function_initializes_other_layers():
    class Net(Pretrained):
        def __init__(self):
            super().__init__()
            self.words.weight.data.copy_(torch.eye(24, 16))
            self.apply(init_linear)

    train = Words(0)
    return Net(), *loaders(train, Words(1, train.vocab))


@no_bug()
def gallery_of_manual_optimization_is_made_anew():
    class Net(planted.ByHand):
        def on_validation_epoch_start(self):
            self.known = None

    return Net(), *digits(batch=20)


@no_bug()
def returns_within_the_step_begin_at_the_end():
    class Net(Policy):
        def loss(self, x):
            policy = torch.distributions.Categorical(logits=self.net(x))
            action = policy.sample()
            rewards = (action == (x[..., 0] > 0)).float()
            returns, total = torch.zeros_like(rewards), torch.zeros(len(x))
            for t in range(rewards.shape[1] - 1, -1, -1):
                total = rewards[:, t] + 0.9 * total
                returns[:, t] = total
            return -(policy.log_prob(action) * (returns - returns.mean(0))).mean()

    return Net(), *states()


@no_bug()
def rewards_so_far_are_a_part_of_the_state():
    class Net(Policy):
        def loss(self, x):
            policy = torch.distributions.Categorical(logits=self.net(x))
            action = policy.sample()
            rewards = (action == (x[..., 0] > 0)).float()
            mean, seen = torch.zeros(len(x)), []
            for r in rewards.unbind(1):
                mean = 0.1 * r + 0.9 * mean
                seen.append(mean)
            return -(policy.log_prob(action) * (rewards - torch.stack(seen, 1).mean(0))).mean()

    return Net(), *states()
