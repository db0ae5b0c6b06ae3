"""Conventions of edges, coordinates, flips and indices, attention by hand, and parts that do not fit each other."""

import copy
import math

import lightning as L
import torch
from programs import Base, LossOnly, Table, bug, diabetes, digits, halves, loaders, segments, tokens
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset, random_split

NODES = 15


class Tree(LossOnly):
    """Adds up what flows down a tree, in three rounds."""

    def __init__(self):
        super().__init__()
        child = torch.arange(1, NODES)
        self.register_buffer("edges", torch.stack([child, (child - 1) // 2]))
        self.net, self.embed = nn.Linear(16, 1), nn.Linear(1, 16)
        self.layers = nn.ModuleList(nn.Linear(32, 16) for _ in range(3))

    def received(self, h):
        source, target = self.edges
        return torch.zeros_like(h).index_add_(1, target, h[:, source])

    def loss(self, x, y):
        h = self.embed(x)
        for layer in self.layers:
            h = layer(torch.cat([h, self.received(h)], -1)).relu()
        return F.mse_loss(self.net(h)[..., 0], y)


def rivers():
    g = torch.Generator().manual_seed(0)
    rain = torch.rand(640, NODES, generator=g)
    flow = rain.clone()
    for node in range(NODES - 1, 0, -1):
        flow[:, (node - 1) // 2] += 0.6 * flow[:, node]
    return halves(rain[..., None], flow, split=480)


@bug("edges-reversed")
def messages_go_against_the_edges():
    class Net(Tree):
        def received(self, h):
            source, target = self.edges
            return torch.zeros_like(h).index_add_(1, source, h[:, target])

    return Net(), *rivers()


class Heat(L.LightningModule):
    """Solves the heat equation of a rod by its residual."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def residual(self, xt):
        xt = xt.clone().requires_grad_()
        u_x, u_t = torch.autograd.grad(self.net(xt).sum(), xt, create_graph=True)[0].unbind(-1)
        u_xx = torch.autograd.grad(u_x.sum(), xt, create_graph=True)[0][:, 0]
        return u_t - 0.1 * u_xx

    def training_step(self, batch, batch_idx):
        (xt,) = batch
        start = torch.stack([xt[:, 0], torch.zeros_like(xt[:, 1])], 1)
        ends = torch.stack([(xt[:, 0] > 0.5).float(), xt[:, 1]], 1)
        first = (self.net(start) - torch.sin(math.pi * xt[:, :1])).square().mean()
        return self.residual(xt).square().mean() + 10 * first + 10 * self.net(ends).square().mean()

    def validation_step(self, batch, batch_idx):
        (xt,) = batch
        exact = torch.exp(-0.1 * math.pi**2 * xt[:, 1:]) * torch.sin(math.pi * xt[:, :1])
        self.log("val/error", (self.net(xt) - exact).square().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def places():
    points = torch.rand(640, 2, generator=torch.Generator().manual_seed(0))
    return loaders(TensorDataset(points[:480]), TensorDataset(points[480:]))


@bug("coordinate-order")
def derivatives_are_unpacked_in_another_order():
    class Net(Heat):
        def residual(self, xt):
            xt = xt.clone().requires_grad_()
            u_t, u_x = torch.autograd.grad(self.net(xt).sum(), xt, create_graph=True)[0].unbind(-1)
            u_xx = torch.autograd.grad(u_x.sum(), xt, create_graph=True)[0][:, 0]
            return u_t - 0.1 * u_xx

    return Net(), *places()


class Value(L.LightningModule):
    """Learns values by returns of four steps."""

    gamma, steps = 0.9, 4

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def aim(self, rewards, next_state):
        powers = self.gamma ** torch.arange(self.steps)
        return (rewards * powers).sum(1) + self.gamma**self.steps * self.target(next_state)[:, 0]

    def training_step(self, batch, batch_idx):
        state, rewards, next_state = batch
        with torch.no_grad():
            aim = self.aim(rewards, next_state)
            for p, q in zip(self.target.parameters(), self.net.parameters(), strict=True):
                p.lerp_(q, 0.05)
        return F.smooth_l1_loss(self.net(state)[:, 0], aim)

    def validation_step(self, batch, batch_idx):
        self.log("val/value", self.net(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=3e-3)


def visits():
    g = torch.Generator().manual_seed(0)
    state = torch.rand(640, 3, generator=g)
    rewards = state[:, :1].expand(-1, 4) + 0.1 * torch.rand(640, 4, generator=g)
    return halves(state, rewards, state + 0.05 * torch.randn(640, 3, generator=g), split=480)


@bug("n-step-discount")
def value_behind_four_steps_is_discounted_once():
    class Net(Value):
        def aim(self, rewards, next_state):
            powers = self.gamma ** torch.arange(self.steps)
            return (rewards * powers).sum(1) + self.gamma * self.target(next_state)[:, 0]

    return Net(), *visits()


class Turned(Base):
    """Segments pictures that are turned in training."""

    def network(self):
        return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 1))

    def turn(self, x, y):
        if torch.rand(()) < 0.5:
            x, y = x.flip(-1), y.flip(-1)
        if torch.rand(()) < 0.5:
            x, y = x.flip(-2), y.flip(-2)
        return x, y

    def training_step(self, batch, batch_idx):
        return self.loss(*self.turn(*batch))


@bug("target-not-flipped")
def mask_is_flipped_along_another_axis():
    class Net(Turned):
        def turn(self, x, y):
            if torch.rand(()) < 0.5:
                x, y = x.flip(-2), y.flip(-1)
            return x, y

    return Net(), *halves(*segments(), split=240)


class Attentive(Base):
    """Classifies padded sentences by an attention of its own; 0 is padding."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(12, 64, padding_idx=0), nn.Linear(64, 192)
        self.norm, self.net = nn.LayerNorm(64), nn.Linear(64, 4)

    def attend(self, q, k, v, padding):
        scores = (q @ k.mT / 8).masked_fill(padding[:, None], -1e9)
        return scores.softmax(-1) @ v

    def forward(self, x):
        padding, h = x == 0, self.embed(x)
        h = h + self.attend(*self.mix(self.norm(h)).chunk(3, -1), padding)
        return self.net(h.masked_fill(padding[..., None], 0).sum(1) / (~padding).sum(1, keepdim=True))


def sentences():
    g = torch.Generator().manual_seed(0)
    x = torch.randint(5, 12, (640, 10), generator=g)
    y = torch.randint(0, 4, (640,), generator=g)
    x[torch.arange(640), torch.randint(0, 5, (640,), generator=g)] = y + 1
    ends = torch.randint(5, 11, (640, 1), generator=g)
    return halves(x.masked_fill(torch.arange(10) >= ends, 0), y, split=480)


@bug("attention-scale")
def scores_are_not_divided():
    class Net(Attentive):
        def attend(self, q, k, v, padding):
            return (q @ k.mT).masked_fill(padding[:, None], -1e9).softmax(-1) @ v

    return Net(), *sentences()


@bug("mask-inverted")
def attention_by_hand_leaves_out_the_words():
    class Net(Attentive):
        def attend(self, q, k, v, padding):
            return (q @ k.mT / 8).masked_fill(~padding[:, None], -1e9).softmax(-1) @ v

    return Net(), *sentences()


@bug("mask-inverted")
def attention_of_torch_gets_a_mask_of_padding():
    class Net(Attentive):
        def attend(self, q, k, v, padding):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=padding[:, None])

    return Net(), *sentences()


class Denoised(Base):
    """Takes the noise from pictures of -1 to 1."""

    peak = 2.0

    def network(self):
        return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))

    def training_step(self, batch, batch_idx):
        noisy, clean = batch
        return F.mse_loss(noisy + self(noisy), clean)

    def validation_step(self, batch, batch_idx):
        noisy, clean = batch
        error = F.mse_loss((noisy + self(noisy)).clamp(-1, 1), clean)
        self.log("val/psnr", 10 * torch.log10(self.peak**2 / error))


def noisy():
    g = torch.Generator().manual_seed(0)
    x = 2 * torch.cat([part.tensors[0] for part in digits(loaded=False)]) - 1
    return halves(x + 0.3 * torch.randn(x.shape, generator=g), x, split=640)


@bug("psnr-peak")
def peak_of_signed_pictures_is_one():
    class Net(Denoised):
        peak = 1.0

    return Net(), *noisy()


class TwoWays(LossOnly):
    """Reads sequences in both directions; whether the first token is that of the class."""

    def __init__(self):
        super().__init__()
        self.embed, self.net = nn.Embedding(12, 16), nn.Linear(32, 1)
        self.rnn = nn.GRU(16, 16, batch_first=True, bidirectional=True)

    def loss(self, x, y):
        return F.binary_cross_entropy_with_logits(self.net(self.read(self.embed(x)))[:, 0], y)

    def read(self, h):
        return torch.cat([*self.rnn(h)[1]], -1)


def first_tokens():
    x = tokens()
    return halves(x, (x[:, 0] < 6).float(), split=480)


@bug("hidden-unused")
def last_output_of_both_directions_is_read():
    class Net(TwoWays):
        def read(self, h):
            return self.rnn(h)[0][:, -1]

    return Net(), *first_tokens()


class Counts(Table):
    """Predicts counts."""

    def loss(self, x, y):
        return F.poisson_nll_loss(self(x)[:, 0], y)


def events():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(640, 10, generator=g)
    return halves(x, torch.poisson(x[:, 0].exp(), generator=g), split=480)


@bug("divided-twice", accumulate_grad_batches=4)
def loss_of_counts_is_divided_by_accumulated_batches():
    class Net(Counts):
        def training_step(self, batch, batch_idx):
            return self.loss(*batch) / self.trainer.accumulate_grad_batches

    return Net(), *events()


class Pictures(Dataset):
    """Digits with a transform."""

    def __init__(self, transform=None):
        self.x, self.y = digits(loaded=False)[0].tensors
        self.transform = transform

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return (self.transform(self.x[i]) if self.transform else self.x[i]), self.y[i]


def moved(x):
    return x.roll(int(torch.randint(-1, 2, ())), -1)


class Halves(L.LightningDataModule):
    """Two parts of the digits, of which the first is moved at random."""

    def setup(self, stage=None):
        self.first, self.second = random_split(Pictures(moved), [480, 160])
        self.settle()

    def settle(self):
        self.second.dataset = Pictures()

    def train_dataloader(self):
        return DataLoader(self.first, 32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.second, 32)


@bug("shared-augmentation")
def transform_of_one_part_is_that_of_both():
    class Data(Halves):
        def settle(self):
            self.second.dataset.transform = None

    return Base(), Data(), None


class Song(LossOnly):
    """A small language model of transformers."""

    def __init__(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        sizes = {"vocab_size": 12, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
        self.net = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

    def loss(self, x, y):
        return self.net(input_ids=x, labels=x).loss


@bug("shifted-twice")
def labels_are_shifted_before_the_library_does():
    class Net(Song):
        def loss(self, x, y):
            return self.net(input_ids=x[:, :-1], labels=x[:, 1:]).loss

    return Net(), *halves(tokens(), tokens(), split=480)


class Slots(LossOnly):
    """Predicts a value of each hour of each day of a week."""

    per_day = 24

    def network(self):
        return nn.Embedding(7 * 24, 1)

    def loss(self, day, hour, y):
        return F.mse_loss(self.net(day * self.per_day + hour)[:, 0], y)


def week():
    g = torch.Generator().manual_seed(0)
    day, hour = torch.randint(0, 7, (640,), generator=g), torch.randint(0, 24, (640,), generator=g)
    return halves(day, hour, torch.sin(hour / 4) * (day < 5), split=480)


@bug("colliding-index")
def hours_of_different_days_have_one_index():
    class Net(Slots):
        per_day = 7

    return Net(), *week()


class Mixed(LossOnly):
    """A mixture of normal densities."""

    dim = 1

    def network(self):
        return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 12))

    def loss(self, x, y):
        weight, mean, deviation = self(x).chunk(3, 1)
        each = torch.distributions.Normal(mean, deviation.clamp(-4, 2).exp()).log_prob(y[:, None])
        return -torch.logsumexp(weight.log_softmax(1) + each, dim=self.dim).mean()


@bug("softmax-of-batch")
def densities_of_samples_are_added_up():
    class Net(Mixed):
        dim = 0

    return Net(), *diabetes()


class Warmed(Base):
    """Has a schedule of a number of steps."""

    def __init__(self, total_steps):
        super().__init__()
        self.total_steps = total_steps

    def factor(self, step):
        warm = max(1, self.total_steps // 10)
        return (step + 1) / warm if step < warm else max(0.0, 1 - (step - warm) / (self.total_steps - warm))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@bug("schedule-unit", max_epochs=3)
def schedule_counts_samples():
    train, val = digits()
    return Warmed(3 * len(train.dataset)), train, val


class Both(Base):
    """Logs the same numbers in training and validation."""

    of_training, of_validation = "train/acc", "val/acc"

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.log(self.of_training, (out.argmax(1) == y).float().mean(), on_step=False, on_epoch=True)
        return F.cross_entropy(out, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log(self.of_validation, (self(x).argmax(1) == y).float().mean())


@bug("shared-log-name")
def both_splits_log_one_name():
    class Net(Both):
        of_training = of_validation = "acc"

    return Net(), *digits()


class Selected(LossOnly):
    """Chooses columns of a table, ever more sharply."""

    tau_start, tau_end = 2.0, 0.1

    def __init__(self):
        super().__init__()
        self.choice = nn.Parameter(0.01 * torch.randn(4, 10, generator=torch.Generator().manual_seed(0)))
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
        self.start, self.end = self.tau_start, self.tau_end

    def tau(self):
        return self.start * (self.end / self.start) ** (self.global_step / self.trainer.estimated_stepping_batches)

    def loss(self, x, y):
        return F.mse_loss(self.net(x @ F.gumbel_softmax(self.choice, tau=self.tau()).T)[:, 0], y)


@bug("ramp-direction")
def temperature_grows_away_from_its_end():
    class Net(Selected):
        def tau(self):
            share = self.global_step / self.trainer.estimated_stepping_batches
            return self.start * (self.start / self.end) ** share

    return Net(), *diabetes()


class Coupling(nn.Module):
    """Scales and moves one half of the values by the other half."""

    def __init__(self, turns):
        super().__init__()
        self.turns, self.net = turns, nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x):
        a, b = x.chunk(2, -1)[:: -1 if self.turns else 1]
        log_scale, shift = self.net(a).chunk(2, -1)
        log_scale = log_scale.tanh()
        b = b * log_scale.exp() + shift
        return torch.cat([b, a] if self.turns else [a, b], -1), log_scale.sum(-1)


class Flow(LossOnly):
    """The density of four values."""

    def network(self):
        return nn.ModuleList(Coupling(bool(i % 2)) for i in range(4))

    def base(self, x):
        return (-0.5 * x.square() - 0.5 * math.log(2 * math.pi)).sum(-1)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def loss(self, x):
        total = torch.zeros(len(x))
        for layer in self.net:
            x, log_det = layer(x)
            total = total + log_det
        return -(self.base(x) + total).mean()


def shapes():
    g = torch.Generator().manual_seed(0)
    u = torch.randn(640, 2, generator=g)
    return halves(torch.cat([u, u.square() - 1 + 0.3 * torch.randn(640, 2, generator=g)], 1), split=480)


@bug("log-determinant")
def density_of_the_base_is_a_mean():
    class Net(Flow):
        def base(self, x):
            return (-0.5 * x.square() - 0.5 * math.log(2 * math.pi)).mean(-1)

    return Net(), *shapes()


def encoder():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())


def trained():
    """The state of an encoder within another network."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        inner = encoder()
        with torch.no_grad():
            for p in inner.parameters():
                p.mul_(2)
    return {f"encoder.{name}": value for name, value in inner.state_dict().items()}


class Tuned(Base):
    """Begins with the encoder of another network, if it is given."""

    def __init__(self, state=None):
        super().__init__()
        self.encoder, self.net = encoder(), nn.Linear(64, 10)
        if state is not None:
            self.encoder.load_state_dict(state, strict=False)

    def forward(self, x):
        return self.net(self.encoder(x))


class Look(L.Callback):
    """Looks at a few predictions from time to time."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx % 10 == 9:
            self.look(pl_module, batch[0])

    @torch.no_grad()
    def look(self, pl_module, x):
        pl_module.eval()
        self.last = pl_module(x).softmax(-1)
        pl_module.train()


class LooksOnly(Look):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx % 10 == 9:
            pl_module.eval()
            self.last = pl_module(batch[0]).detach()

    def look(self, pl_module, x):
        pass


class Dropped(Base):
    """Drops half of its hidden values."""

    def network(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))


@bug("eval-in-training", callbacks=lambda: [LooksOnly()])
def callback_leaves_the_mode_of_evaluation():
    return Dropped(), *digits()


class Weighed(nn.Module):
    """Adds two losses."""

    def __init__(self, amount):
        super().__init__()
        self.amount = amount

    def forward(self, one, other):
        return one + self.amount * other


class Held(Table):
    """Holds its predictions near 0."""

    def __init__(self, amount=0.0):
        super().__init__()
        self.amount = amount
        self.criterion = Weighed(self.amount)

    def loss(self, x, y):
        out = self(x)[:, 0]
        return self.criterion(F.mse_loss(out, y), out.square().mean())


class Ramp(L.Callback):
    """Raises the weight of the second loss."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.criterion.amount = 0.1 * min(1.0, trainer.current_epoch / 2)


class VainRamp(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.amount = 0.1 * min(1.0, trainer.current_epoch / 2)


@bug("unread-attribute", callbacks=lambda: [VainRamp()])
def callback_raises_a_weight_that_nothing_reads():
    return Held(), *diabetes()


class Scaled(Table):
    """Predicts standardized values of a unit."""

    def to_mmol(self, y):
        return 77 * y + 152

    def rated(self, out, y):
        return self.to_mmol(out), self.to_mmol(y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out, y = self.rated(self(x)[:, 0], y)
        self.log("val/mae_mmol", F.l1_loss(out, y))

    def predict_step(self, batch, batch_idx):
        return self.to_mmol(self(batch[0]))


@bug("misnamed-metric")
def error_of_a_unit_is_that_of_standardized_values():
    class Net(Table):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/mae_mmol", F.l1_loss(self(x)[:, 0], y))

        def predict_step(self, batch, batch_idx):
            return self.to_mmol(self(batch[0]))

        def to_mmol(self, y):
            return 77 * y + 152

    return Net(), *diabetes()


class Average(L.Callback):
    """Validates an average of the weights."""

    decay = 0.98

    def on_fit_start(self, trainer, pl_module):
        self.mean = copy.deepcopy(pl_module.state_dict())

    @torch.no_grad()
    def update(self, pl_module):
        for name, value in pl_module.state_dict().items():
            self.mean[name].lerp_(value, 1 - self.decay)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.update(pl_module)

    def on_validation_start(self, trainer, pl_module):
        self.own = copy.deepcopy(pl_module.state_dict())
        pl_module.load_state_dict(self.mean)

    def on_validation_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.own)


class RareAverage(Average):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pass

    def on_validation_start(self, trainer, pl_module):
        self.update(pl_module)
        super().on_validation_start(trainer, pl_module)


@bug("average-per-epoch", callbacks=lambda: [RareAverage()])
def average_moves_in_validations_only():
    return Base(), *digits()


@bug("partial-validation")
def validation_is_drawn_with_replacement():
    train, val = digits(loaded=False)
    return Base(), DataLoader(train, 32, shuffle=True), DataLoader(val, 32, sampler=RandomSampler(val, True))


@bug("reshape-not-transpose")
def classes_of_pixels_are_moved_by_view_as():
    class Net(Turned):
        def training_step(self, batch, batch_idx):
            x, y = batch
            p = self(x).softmax(1)
            t = F.one_hot(y, 3).view_as(p).float()
            return 1 - (2 * (p * t).sum((0, 2, 3)) / (p + t).sum((0, 2, 3)).clamp_min(1e-6)).mean()

    return Net(), *halves(*segments(), split=240)
