"""The programs of ``planted/twentysecond.py`` without their bugs, and what looks like them."""

import torch
from programs import LossOnly, halves, loaders, mlp, no_bug, tokens
from programs.planted.tenth import Prototypes
from programs.planted.twentysecond import (
    Cart,
    Decoder,
    Diffusion,
    Recommender,
    Tagger,
    choices,
    demonstrations,
    episodes,
    points,
    sentences,
    users,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


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


@no_bug()
def sampler_passes_the_share_of_the_steps():
    return Diffusion(), *points()


@no_bug()
def both_pass_the_number_of_the_step():
    class Net(Diffusion):
        def noise(self, x, t):
            return super().noise(x, t * self.steps)

    return Net(), *points()


@no_bug()
def samples_begin_with_more_noise_than_any():
    class Net(Diffusion):
        def validation_step(self, batch, batch_idx):
            x = 20 * torch.randn_like(batch)
            for i in reversed(range(self.steps)):
                x = x - 0.2 * self.noise(x, torch.full((len(x),), i / self.steps))
            self.log("val/distance", torch.cdist(x, batch).min(1).values.mean())

    return Net(), *points()


@no_bug()
def times_beyond_those_of_training():
    """A curve of the first second is continued by whole seconds."""

    class Net(LossOnly):
        def network(self):
            return mlp(1, 32, 1)

        def loss(self, t, y):
            return F.mse_loss(self.net(t[:, None])[:, 0], y)

        def on_validation_epoch_end(self):
            later = [self.net(torch.full((1, 1), float(i))) for i in range(20)]
            self.log("val/later", torch.cat(later).mean())

    t = torch.rand(640, generator=torch.Generator().manual_seed(0))
    return Net(), *halves(t, t.sin())


@no_bug()
def controller_gets_what_is_standardized():
    return Cart(), *demonstrations()


@no_bug()
def simulation_diverges():
    """States are in the units of the network, and leave its range because of its outputs."""

    class Net(Cart):
        def on_validation_epoch_end(self):
            x = torch.randn(40, 3)
            for _ in range(30):
                x = 1.4 * x + self.net(x) * torch.tensor([20.0, 1.0, 0.1])
            self.log("val/place", x[:, 0].abs().mean())

    return Net(), *demonstrations()


@no_bug()
def far_samples_are_to_be_noticed():
    class Net(Cart):
        def on_validation_epoch_end(self):
            far = torch.tensor([30.0, 0.0, 0.0]) + torch.randn(40, 3)
            self.log("val/far", self.net(far).abs().mean())

    return Net(), *demonstrations()


@no_bug()
def scale_is_that_of_the_batches_before():
    """States are scaled by statistics that training updates, as of an environment."""

    class Net(Cart):
        def loss(self, batch):
            x, y = batch
            x = x * torch.tensor([80.0, 0.5, 0.1]) + torch.tensor([20.0, 1.0, -0.1])
            if self.training:
                self.mean.lerp_(x.mean(0), 0.1)
                self.deviation.lerp_(x.std(0), 0.1)
            return F.mse_loss(self.net(self.scaled(x))[:, 0], y)

        def __init__(self):
            super().__init__()
            self.mean.zero_()
            self.deviation.fill_(1)

        def start(self):
            return torch.tensor([80.0, 0.5, 0.1]) * torch.randn(40, 3)

    return Net(), *demonstrations()


@no_bug()
def known_items_are_the_last():
    class Net(Recommender):
        def best(self, user, scores):
            return scores.masked_fill(self.known[user], -torch.inf).topk(10).indices

    return Net(), *users()


@no_bug()
def known_items_are_left_out_of_the_best():
    class Net(Recommender):
        def best(self, user, scores):
            order = scores.argsort(1, descending=True)
            return torch.stack([row[~known[row]][:10] for row, known in zip(order, self.known[user], strict=True)])

    return Net(), *users()


@no_bug()
def known_items_are_left_out_by_arrays():
    class Net(Recommender):
        def best(self, user, scores):
            scores = scores.numpy().copy()
            scores[self.known[user].numpy()] = -1e9
            return torch.tensor((-scores).argsort(1)[:, :10].copy())

    return Net(), *users()


@no_bug()
def loss_of_all_items_counts_the_known_ones():
    class Net(Recommender):
        def validation_step(self, batch, batch_idx):
            user, wanted = batch
            scores = self.net(user) @ self.items.weight.T
            self.log("val/entropy_of_next", F.cross_entropy(scores, wanted[:, 0]))
            best = scores.masked_fill(self.known[user], -torch.inf).topk(10).indices
            self.log("val/recall", (wanted[:, :, None] == best[:, None]).any(2).float().mean())

    return Net(), *users()


@no_bug()
def items_are_chosen_again():
    """Users choose the same items again, as songs, which are looked for."""
    train, _ = users()
    known, wanted = choices()
    again = torch.cat([wanted[:, :2], known[:, :1]], 1)
    return Recommender(), train, DataLoader(TensorDataset(torch.arange(120), again), 120)


@no_bug()
def items_that_are_not_chosen_are_samples_too():
    """Pairs of which some are labeled 0, as they have not been chosen."""

    class Net(Recommender):
        def training_step(self, batch, batch_idx):
            user, item, label = batch
            return F.binary_cross_entropy_with_logits((self.net(user) * self.items(item)).sum(1), label)

        def best(self, user, scores):
            return scores.masked_fill(self.known[user], -torch.inf).topk(10).indices

    known, wanted = choices()
    g = torch.Generator().manual_seed(0)
    free = torch.ones(120, 100).scatter(1, torch.cat([known, wanted], 1), 0)
    items = torch.cat([known, torch.multinomial(free, 16, generator=g)], 1)
    labels = torch.cat([torch.ones(120, 16), torch.zeros(120, 16)], 1)
    rows = TensorDataset(torch.arange(120).repeat_interleave(32), items.flatten(), labels.flatten())
    return Net(), DataLoader(rows, 64, shuffle=True), users()[1]
