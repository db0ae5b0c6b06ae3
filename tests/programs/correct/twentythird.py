"""The programs of ``planted/twentysecond.py`` without their bugs, and what looks like them."""

import torch
from programs import LossOnly, halves, loaders, mlp, no_bug, tokens
from programs.planted.tenth import Prototypes
from programs.planted.twentysecond import Decoder, Tagger, episodes, sentences
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset


@no_bug()
def queries_of_a_validation_are_other_samples():
    return Prototypes(), *episodes(apart=True)


class Curves(Dataset):
    """Curves of 16 values at 24 times, some of which are given; in validation, twice as many."""

    def __init__(self, count, given, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 24, 16, generator=g)
        self.rows = torch.stack([torch.randperm(24, generator=g)[:given] for _ in range(count)])

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i, self.rows[i]], self.x[i]


@no_bug()
def what_is_given_in_validation_is_predicted_too():
    class Net(LossOnly):
        def network(self):
            return mlp(16, 32, 16)

        def loss(self, given, x):
            return F.mse_loss(self.net(given.mean(1))[:, None].expand_as(x), x)

    train, val = Curves(320, 8, 0), Curves(160, 12, 1)
    return Net(), *loaders([(x[:8], x[8:]) for _, x in (train[i] for i in range(320))], val)


@no_bug()
def accuracy_is_of_words():
    class Net(Tagger):
        def counted(self, right, there):
            return right[there]

    return Net(), *sentences()


@no_bug()
def all_words_of_a_sentence_are_right():
    class Net(Tagger):
        def counted(self, right, there):
            return (right | ~there).all(1)

    return Net(), *sentences()


@no_bug()
def only_the_first_words_are_learned():
    """The loss leaves some words out on purpose, which the accuracy counts."""

    class Net(Tagger):
        def training_step(self, batch, batch_idx):
            words, tags, there = batch
            losses = F.cross_entropy(self(words).transpose(1, 2), tags, reduction="none")
            kept = there & (torch.arange(words.shape[1]) < (there.sum(1, keepdim=True) + 1) // 2)
            return (losses * kept).sum() / kept.sum()

        def counted(self, right, there):
            return right[there]

    return Net(), *sentences()


@no_bug()
def tokens_are_counted_on():
    return Decoder(), *halves(tokens())


@no_bug()
def first_tokens_are_scored():
    """Each pass is of another first token alone."""

    class Net(Decoder):
        def validation_step(self, batch, batch_idx):
            for token in range(12):
                out, _ = self(torch.full((len(batch), 1), token))
                self.log(f"val/loss_{token}", F.cross_entropy(out[:, 0], batch[:, 1]))

    return Net(), *halves(tokens())


@no_bug()
def tokens_before_are_passed_again():
    class Net(Decoder):
        def continued(self, start, count):
            found = start
            for _ in range(count):
                found = torch.cat([found, self(found)[0][:, -1:].argmax(-1)], 1)
            return found[:, start.shape[1] :]

    return Net(), *halves(tokens())
