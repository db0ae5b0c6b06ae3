"""Bugs of another set, written when the checks of the others were there: docs/diagnosis.md has their first count."""

import copy

import torch
from programs import Base, Causal, Convnet, LossOnly, Table, bug, diabetes, digits, loaders, mlp, sequences, tokens
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


@bug("cut-gradient")
def hard_code():
    """A discrete code by argmax and one-hot, through which no gradient comes."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = mlp(64, 32, 16), nn.Linear(16, 10)

        def loss(self, x, y):
            code = F.one_hot(self.encoder(x).argmax(1), 16).float()
            return F.cross_entropy(self.decoder(code), y)

        def configure_optimizers(self):
            return torch.optim.Adam([*self.encoder.parameters(), *self.decoder.parameters()], lr=1e-2)

    return M(), *digits()


@bug("rounded-gradient", "cut-gradient")
def straight_through_reversed():
    """A straight-through estimator that detaches the wrong part."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.encoder, self.decoder = None, mlp(64, 32, 16), nn.Linear(16, 10)

        def loss(self, x, y):
            h = self.encoder(x)
            return F.cross_entropy(self.decoder(h.detach() + (h.round() - h.detach())), y)

    return M(), *digits()


@bug("same-layer")
def one_block_four_times():
    """A list that is multiplied: four times the same block."""

    class M(Base):
        def network(self):
            blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU())] * 4
            return nn.Sequential(nn.Flatten(), *blocks, nn.Linear(64, 10))

    return M(), *digits()


@bug("unregistered", "late-parameter", "no-update", "cut-gradient", "foreign-optimizer", "replaced-parameter")
def parameter_replaced_in_forward():
    """Weights are normalized by assigning a new parameter, which the optimizer does not have."""

    class M(Base):
        def forward(self, x):
            self.net[3].weight = nn.Parameter(F.normalize(self.net[3].weight.detach(), dim=1))
            return self.net(x)

    return M(), *digits()


@bug("eval-in-training")
def evaluated_for_logging():
    """The accuracy of the training batch is computed in evaluation mode, which stays."""

    class M(Base):
        def network(self):
            return Convnet()

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self(x), y)
            self.eval()
            with torch.no_grad():
                self.log("train/acc", (self(x).argmax(1) == y).float().mean())
            return loss

    return M(), *digits()


@bug("cut-gradient")
def auxiliary_loss_as_number():
    """The loss of a second head is added as a number."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.side = nn.Linear(64, 4)

        def loss(self, x, y):
            h = self.net[:3](x)
            return F.cross_entropy(self.net[3](h), y) + 0.3 * F.cross_entropy(self.side(h), y % 4).item()

    return M(), *digits()


@bug("mixing", "position")
def attention_weights_over_the_batch():
    """Attention by hand, whose softmax is over the samples."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net, self.q, self.k, self.v = nn.Linear(16, 4), nn.Linear(5, 16), nn.Linear(5, 16), nn.Linear(5, 16)

        def loss(self, x, y):
            weights = (self.q(x) @ self.k(x).mT / 4).softmax(0)
            return F.cross_entropy(self.net((weights @ self.v(x)).mean(1)), y)

    x, y = sequences()
    return M(), *loaders(TensorDataset(x[:480], y[:480]), TensorDataset(x[480:], y[480:]))


@bug("one-class-batches", "duplicates", "overlap", "constant-input", "same-samples")
def dataset_ignores_its_index():
    class Same(Dataset):
        def __init__(self, data):
            self.data = data

        def __len__(self):
            return len(self.data)

        def __getitem__(self, index):
            return self.data[0]

    train, val = digits(loaded=False)
    return Base(), *loaders(Same(train), val)


@bug("split-scale")
def training_scaled_twice():
    train, val = digits(loaded=False)
    x, y = train.tensors
    return Base(), *loaders(TensorDataset(x / 16, y), val)


@bug("position", "mixing", "misaligned", "same-output")
def last_sample_for_last_time():
    """outputs[-1] of a recurrent network with batch_first is the last sample."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.rnn, self.net = nn.GRU(5, 32, batch_first=True), nn.Linear(32, 4)

        def loss(self, x, y):
            out, _ = self.rnn(x)
            return F.cross_entropy(self.net(out[-1])[: len(y)].mean(0).expand(len(y), -1), y)

    x, y = sequences()
    return M(), *loaders(TensorDataset(x[:480], y[:480]), TensorDataset(x[480:], y[480:]))


@bug("schedule-called-twice", max_epochs=4)
def schedule_called_twice():
    """The module calls a schedule that Lightning calls, too."""

    class M(Base):
        def training_step(self, batch, batch_idx):
            self.lr_schedulers().step()
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return M(), *digits()


@bug("tiny-update", gradient_clip_val=1e-7)
def clipped_to_no_length():
    class M(Base):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    return M(), *digits()


@bug("average-unchanged")
def target_is_never_copied():
    """The exponential average that validation uses is a deepcopy whose update is forgotten."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.average = copy.deepcopy(self.net).requires_grad_(False)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/acc", (self.average(x).argmax(1) == y).float().mean())

    return M(), *digits()


@bug("zero-gradient")
def weight_of_a_loss_is_zero():
    """An integer division makes the weight of the second loss 0."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.side = nn.Linear(64, 4)

        def loss(self, x, y):
            h = self.net[:3](x)
            return F.cross_entropy(self.net[3](h), y) + (1 // 2) * F.cross_entropy(self.side(h), y % 4)

    return M(), *digits()


@bug("unregistered", "late-parameter")
def positions_created_in_forward():
    """Positions are a new parameter in each forward pass."""

    class M(Causal):
        def forward(self, x):
            hidden = self.embed(x) + nn.Parameter(torch.randn(x.shape[1], 32) * 0.02)
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.net(self.body(hidden, mask=mask, is_causal=True))

    rows = tokens()
    pairs = TensorDataset(rows[:, :-1], rows[:, 1:])
    return M(), DataLoader(pairs, 32, shuffle=True), DataLoader(pairs, 32)


@bug("foreign-optimizer", "nothing-trained")
def optimizer_of_a_copy():
    class M(Base):
        def configure_optimizers(self):
            return torch.optim.Adam(copy.deepcopy(self.net).parameters(), 1e-2)

    return M(), *digits()


@bug("same-output", "dead-layer", "huge-update", "initial-loss")
def raw_table_through_sigmoids():
    """A table that is not scaled saturates sigmoids from the start."""

    class M(Table):
        def network(self):
            layers = [nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)]
            for layer in layers[::2]:
                nn.init.constant_(layer.bias, -50.0)
            return nn.Sequential(*layers)

    return M(), *diabetes()
