"""Correct programs that are close to the bugs of ``planted/eleventh.py``."""

import torch
from programs import LossOnly, halves, loaders, mlp, no_bug, sequences, tokens
from programs.planted.eleventh import (
    Averaged,
    Colors,
    Contrast,
    Graphs,
    Lengths,
    OfGraphs,
    Pictures,
    Pooled,
    Rare,
    Sentences,
    Tagger,
    Transitions,
    Views,
    rare_rows,
    sentences,
    transitions,
    with_copies,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


@no_bug()
def attention_over_the_times():
    return Pooled(), *halves(*sequences())


@no_bug()
def attention_to_a_memory_that_grows():
    """The first of its softmaxes is of one element."""

    class M(Pooled):
        def forward(self, x):
            memory = []
            for t in range(x.shape[1]):
                memory.append(x[:, t])
                past = torch.stack(memory, 1)
                read = (self.score(past).softmax(1) * past).sum(1)
            return self.net(read)

    return M(), *halves(*sequences(length=5))


@no_bug()
def ends_of_episodes_read_in_a_method():
    return Transitions(), *transitions()


@no_bug()
def rare_class_is_copied_after_the_split():
    x, y = rare_rows(800)
    return Rare(), *loaders(TensorDataset(*with_copies(x[:600], y[:600])), TensorDataset(x[600:], y[600:]))


@no_bug()
def picture_permuted_in_the_dataset():
    class Data(Pictures):
        moves = True

    return Colors(), *loaders(Data(0), Data(1))


@no_bug()
def views_drawn_anew():
    return Contrast(), *loaders(Views(True), Views(True, first=1000))


@no_bug()
def autoencoder_of_a_pair():
    """The second part of the batch, which is the first one, is the target."""

    class M(LossOnly):
        def network(self):
            return mlp(32, 16, 32)

        def loss(self, x, y):
            return F.mse_loss(self(x), y)

    x = Views(True).x
    return M(), *halves(x, x.clone(), split=240)


@no_bug()
def dropout_makes_the_views():
    """One sentence, passed twice, has two views by dropout."""

    class M(Contrast):
        def network(self):
            return nn.Sequential(nn.Dropout(0.2), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))

        def training_step(self, batch, batch_idx):
            return self.loss(batch[0], batch[0])

        def validation_step(self, batch, batch_idx):
            pass

    x = Views(True).x
    return M(), *halves(x, torch.zeros(len(x), dtype=torch.long), split=240)


@no_bug()
def tags_are_padded_with_what_is_ignored():
    class Data(Sentences):
        pads_tags = -100

    return Tagger(), *sentences(Data)


@no_bug()
def padding_is_left_out_of_the_loss_by_hand():
    class M(Tagger):
        def loss(self, words, tags):
            hidden, _ = self.body(self.embed(words).transpose(0, 1))
            each = F.cross_entropy(self.net(hidden.transpose(0, 1)).transpose(1, 2), tags, reduction="none")
            return each[words > 0].mean()

    return M(), *sentences(Sentences)


@no_bug()
def mean_of_the_words():
    class M(Averaged):
        masks = True

    return M(), *sentences(Lengths)


@no_bug()
def edges_are_shifted():
    return OfGraphs(), *sentences(Graphs)


@no_bug()
def frozen_encoder_without_positions():
    """A frozen encoder, to which prompts are learned, knows no order, and the class depends on none."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(12, 16).requires_grad_(False)
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).requires_grad_(False)
            self.prompts, self.net = nn.Parameter(torch.randn(4, 16) / 4), nn.Linear(16, 2)

        def forward(self, x):
            prompts = self.prompts.expand(len(x), -1, -1)
            return self.net(self.body(torch.cat([prompts, self.embed(x)], 1)).mean(1))

    x = tokens()
    return M(), *halves(x, ((x == 3).sum(1) > 1).long())
