"""Bugs of outputs, losses and shapes."""

import torch
from programs import Base, Causal, LossOnly, Table, bug, diabetes, digits, halves, mlp, segments, sequences, tokens
from torch import nn
from torch.nn import functional as F


@bug("not-log")
def nll_of_logits():
    """Nll_loss without log_softmax."""

    class M(Base):
        def loss(self, x, y):
            return F.nll_loss(self(x), y)

    return M(), *digits()


@bug("not-log")
def nll_of_probabilities():
    """Nll_loss of a softmax."""

    class M(Base):
        def loss(self, x, y):
            return F.nll_loss(self(x).softmax(1), y)

    return M(), *digits()


@bug("double-sigmoid")
def double_sigmoid():
    """Sigmoid before binary_cross_entropy_with_logits."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(mlp(outputs=1), nn.Sigmoid())

        def loss(self, x, y):
            return F.binary_cross_entropy_with_logits(self(x)[:, 0], (y > 4).float())

    return M(), *digits()


@bug("double-softmax")
def softmax_permuted():
    """Softmax, then permute, then cross-entropy of pixels."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))

        def loss(self, x, y):
            p = self.net(x).softmax(1).permute(0, 2, 3, 1).reshape(-1, 3)
            return F.cross_entropy(p, y.reshape(-1))

    x, y = segments()
    return M(), *halves(x, y, split=256)


@bug("one-class")
def one_class():
    """Binary labels, cross-entropy of one output."""

    class M(LossOnly):
        def network(self):
            return mlp(outputs=1)

        def loss(self, x, y):
            return F.cross_entropy(self(x), torch.zeros_like(y))

    return M(), *digits()


@bug("softmax-of-one")
def softmax_of_one():
    """Softmax of a single output, then binary cross-entropy."""

    class M(LossOnly):
        def network(self):
            return mlp(outputs=1)

        def loss(self, x, y):
            return F.binary_cross_entropy(self(x).softmax(1)[:, 0], (y > 4).float())

    return M(), *digits()


@bug("not-log")
def kl_of_probabilities():
    """Distillation by kl_div of probabilities, not of their logarithm."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.teacher = mlp().requires_grad_(False)

        def loss(self, x, y):
            return F.kl_div(self(x).softmax(1), self.teacher(x).softmax(1), reduction="batchmean")

    return M(), *digits()


@bug("bce-target")
def labels_one_two():
    """Binary labels are 1 and 2."""

    class M(LossOnly):
        def network(self):
            return mlp(outputs=1)

        def loss(self, x, y):
            return F.binary_cross_entropy_with_logits(self(x)[:, 0], 1.0 + (y > 4).float())

    return M(), *digits()


@bug("relu-logits")
def relu_before_loss():
    """The last layer has a ReLU."""

    class M(Base):
        def network(self):
            return nn.Sequential(mlp(), nn.ReLU())

    return M(), *digits()


@bug("broadcasting")
def broadcast_by_hand():
    """(N, 1) minus (N,) in a hand-written squared error."""

    class M(Table):
        def loss(self, x, y):
            return (self(x) - y).pow(2).mean()

    return M(), *diabetes()


@bug("broadcasting")
def broadcast_mse():
    """Mse_loss of (N, 1) and (N,)."""

    class M(Table):
        def loss(self, x, y):
            return F.mse_loss(self(x), y)

    return M(), *diabetes()


@bug("range")
def sigmoid_of_large():
    """A sigmoid predicts values of 25 to 346."""

    class M(Table):
        def forward(self, x):
            return self.net(x).sigmoid()

    return M(), *diabetes(scale=False)


@bug("channels-flattened", "misaligned")
def channels_flattened():
    """Logits (N, C, H, W) are flattened without moving C to the end."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))

        def loss(self, x, y):
            return F.cross_entropy(self.net(x).reshape(-1, 3), y.reshape(-1))

    x, y = segments()
    return M(), *halves(x, y, split=256)


@bug("reshape-not-transpose")
def view_not_transpose():
    """View instead of transpose of time and channels before a convolution."""

    class M(Base):
        def network(self):
            return nn.Sequential(
                nn.Conv1d(5, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 4)
            )

        def forward(self, x):
            return self.net(x.view(len(x), 5, 12))

    x, y = sequences()
    return M(), *halves(x, y)


@bug("misaligned")
def time_major_logits():
    """Logits (T, N, C) are flattened against targets (N, T)."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.net = nn.Embedding(12, 16), nn.GRU(16, 32), nn.Linear(32, 12)

        def loss(self, x, y):
            out = self.net(self.rnn(self.embed(x).transpose(0, 1))[0])  # (T, N, C)
            return F.cross_entropy(out.reshape(-1, 12), y.reshape(-1))

    t = tokens()
    return M(), *halves(t[:, :-1], t[:, 1:])


@bug("position")
def positions_of_batch():
    """Positional encoding is added along the batch, as its tutorial has (T, N, D)."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.embed, self.net = nn.Linear(5, 16), nn.Linear(16, 4)
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 1)
            self.register_buffer("positions", torch.randn(64, 1, 16))

        def forward(self, x):
            hidden = self.embed(x)
            return self.net(self.body(hidden + self.positions[: hidden.size(0)]).mean(1))

    x, y = sequences()
    return M(), *halves(x, y)


@bug("future-leak")
def no_causal_mask():
    """A language model without a causal mask (pytorch/tutorials#2478)."""

    class M(Causal):
        causal = False

    t = tokens()
    return M(), *halves(t[:, :-1], t[:, 1:])


@bug("future-leak", "label-leak")
def not_shifted():
    """The targets of a language model are its inputs, not shifted by one."""

    t = tokens()
    return Causal(), *halves(t, t)


@bug("mixing")
def attention_over_batch():
    """A transformer layer with batch_first=False gets (N, T, D)."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.embed, self.net = nn.Linear(5, 16), nn.Linear(16, 4)
            self.body = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)

        def forward(self, x):
            return self.net(self.body(self.embed(x)).mean(1))

    x, y = sequences()
    return M(), *halves(x, y)


@bug("mixing")
def batch_statistics():
    """Inputs are standardized by the mean of their own batch, also in evaluation."""

    class M(Base):
        def forward(self, x):
            return self.net((x - x.mean(0)) / (x.std(0) + 0.1))

    return M(), *digits()


@bug("mixing")
def first_sample_for_all():
    """An index is missing: features of sample 0 are used for all."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.context = nn.Linear(64, 64)

        def forward(self, x):
            return self.net(x.flatten(1) + self.context(x.flatten(1))[0])

    return M(), *digits()


@bug("dropout-in-validation")
def functional_dropout():
    """F.dropout(x, 0.5), whose default is training=True (PICK-pytorch#77)."""

    class M(Base):
        def forward(self, x):
            return self.net(F.dropout(x, 0.5))

    return M(), *digits()


@bug("misaligned")
def labels_permuted():
    """Samples are shuffled in training_step, their labels are not."""

    class M(Base):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return self.loss(x[torch.randperm(len(x))], y)

    return M(), *digits()


@bug("label-leak")
def label_as_feature():
    """The regression target is one of the features in training_step."""

    class M(Table):
        def network(self):
            return nn.Sequential(nn.Linear(11, 32), nn.ReLU(), nn.Linear(32, 1))

        def loss(self, x, y):
            return F.mse_loss(self.net(torch.cat([x, y[:, None]], 1))[:, 0], y)

    return M(), *diabetes()


@bug("unused-input")
def half_input():
    """Only the upper half of each picture is used."""

    class M(Base):
        def network(self):
            return mlp(inputs=32)

        def forward(self, x):
            return self.net(x[:, :, :4])

    return M(), *digits()


@bug("mixing")
def pooled_over_batch():
    """The mean over time is taken over the batch instead."""

    class M(Base):
        def network(self):
            return nn.Linear(60, 4)

        def forward(self, x):
            return self.net((x - x.mean(0, keepdim=True)).flatten(1))

    x, y = sequences()
    return M(), *halves(x, y)
