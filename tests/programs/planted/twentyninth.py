"""What numbers, keys, weights and counts are named and are not, and numbers of one batch."""

import copy
import random

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from programs import Base, LossOnly, Manual, Table, bug, diabetes, digits, halves, loaders, tokens
from programs.planted.twentyeighth import Gallery, Pretrained, Words
from programs.planted.twentyfifth import Policy, states
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler
from torchmetrics import F1Score


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


class Rated(Base):
    """Validates by a metric of torchmetrics."""

    name, average, top_k = "val/macro_f1", "micro", 1

    def __init__(self):
        super().__init__()
        self.metric = F1Score(task="multiclass", num_classes=10, average=self.average, top_k=self.top_k)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.metric(self(x), y)
        self.log(self.name, self.metric)


@bug("misnamed-metric")
def macro_score_is_micro():
    return Rated(), *digits()


@bug("misnamed-metric")
def top_five_is_top_one():
    class Net(Rated):
        name = "val/top5_f1"

    return Net(), *digits()


@bug("misnamed-metric")
def root_of_the_error_is_not_taken():
    class Net(Table):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/rmse", F.mse_loss(self(x)[:, 0], y))

    return Net(), *diabetes()


@bug("misnamed-metric")
def absolute_error_is_squared():
    class Net(Table):
        def on_validation_epoch_start(self):
            self.gaps = []

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.gaps.append(self(x)[:, 0] - y)

        def on_validation_epoch_end(self):
            self.log("val/mae", (torch.cat(self.gaps) ** 2).mean())

    return Net(), *diabetes()


class Grouped(Base):
    """Decays some parameters only."""

    decays = (0.0, 0.05)

    def configure_optimizers(self):
        flat, matrices = ([p for p in self.parameters() if (p.ndim > 1) is is_matrix] for is_matrix in (False, True))
        groups = [{"params": g, "weight_decay": d} for g, d in zip((flat, matrices), self.decays, strict=True)]
        return torch.optim.AdamW(groups, lr=1e-3)


@bug("decay-of-biases")
def groups_of_weight_decay_are_exchanged():
    class Net(Grouped):
        decays = (0.05, 0.0)

    return Net(), *digits()


def rare():
    """Digits of which all but two classes are rare, and a weight for each."""
    train, val = digits(loaded=False)
    x, y = train.tensors
    kept = (y < 2) | (torch.arange(len(y)) % 10 == 0)
    return TensorDataset(x[kept], y[kept]), val, (1 / y[kept].bincount(minlength=10))[y[kept]]


@bug("sampler-weights")
def weighted_samples_are_drawn_once():
    train, val, weights = rare()
    sampler = WeightedRandomSampler(weights, len(train), replacement=False)
    return Base(), DataLoader(train, 16, sampler=sampler), DataLoader(val, 32)


class Heads(LossOnly):
    """Two values of a table, each by its own head."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
        self.heads = nn.ModuleDict({name: nn.Linear(32, 1) for name in ("height", "age")})

    def loss(self, x, height, age):
        out = {name: head(self.net(x))[:, 0] for name, head in self.heads.items()}
        return self.both(out, {"height": height, "age": age})

    def both(self, out, y):
        return F.mse_loss(out["height"], y["height"]) + F.mse_loss(out["age"], y["age"])


def patients():
    (x, y), (v, w) = (part.tensors for part in diabetes(loaded=False))
    x, y = torch.cat([x, v]), torch.cat([y, w])
    return halves(x, y, x[:, 0] + 0.5 * x[:, 3], split=320)


@bug("mismatched-keys")
def head_learns_what_another_one_should():
    class Net(Heads):
        def both(self, out, y):
            return F.mse_loss(out["height"], y["height"]) + F.mse_loss(out["age"], y["height"])

    return Net(), *patients()


class Shifted(Dataset):
    """Digits that are moved at random."""

    def __init__(self):
        self.x, self.y = digits(loaded=False)[0].tensors
        self.kept = {}

    def __len__(self):
        return len(self.x)

    def augment(self, i):
        return self.x[i].roll(random.randrange(-1, 2), dims=-1)

    def __getitem__(self, i):
        return self.augment(i), self.y[i]


@bug("cached-augmentation")
def augmented_digits_are_kept():
    class Data(Shifted):
        def __getitem__(self, i):
            if i not in self.kept:
                self.kept[i] = self.augment(i)
            return self.kept[i], self.y[i]

    return Base(), *loaders(Data(), digits(loaded=False)[1])


class Summed(Base):
    """Averages the loss of a validation by hand."""

    def on_validation_epoch_start(self):
        self.total, self.count = 0.0, 0

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.add(F.cross_entropy(self(x), y), len(y))

    def add(self, loss, size):
        self.total += loss
        self.count += size

    def on_validation_epoch_end(self):
        self.log("val/loss", self.total / self.count)


@bug("averaged-metric")
def means_of_batches_are_divided_by_samples():
    return Summed(), *digits()


class Critics(L.LightningModule):
    """A Wasserstein GAN of points."""

    n_critic = 4

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))

    def made(self, x):
        return self.generator(torch.randn(len(x), 4))

    def step_critic(self, x, optimizer):
        loss = self.critic(self.made(x).detach()).mean() - self.critic(x).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        for p in self.critic.parameters():
            p.data.clamp_(-0.1, 0.1)

    def step_generator(self, x, optimizer):
        optimizer.zero_grad()
        self.manual_backward(-self.critic(self.made(x)).mean())
        optimizer.step()

    def training_step(self, x, batch_idx):
        first, second = self.optimizers()
        if batch_idx % self.n_critic == 0:
            self.step_critic(x, second)
        self.step_generator(x, first)

    def validation_step(self, x, batch_idx):
        self.log("val/distance", (self.made(x).mean(0) - x.mean(0)).norm())

    def configure_optimizers(self):
        return [torch.optim.RMSprop(part.parameters(), 1e-3) for part in (self.generator, self.critic)]


def points():
    x = torch.randn(640, 2, generator=torch.Generator().manual_seed(0)) * 0.5 + torch.tensor([1.0, 2.0])
    return loaders(x[:480], x[480:])


@bug("critic-steps")
def critic_steps_less_often():
    return Critics(), *points()


class Neighbours(Base):
    """Ranks the classes of each digit."""

    most = 0.0

    def validation_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x).clamp(max=self.most)
        rank = 1 + (scores > scores.gather(1, y[:, None])).sum(1)
        self.log("val/mrr", (1 / rank.float()).mean())


@bug("optimistic-ties")
def equal_scores_rank_behind_the_target():
    return Neighbours(), *digits()


class Logged(Base):
    """Logs an accuracy with options."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/acc", (self(x).argmax(1) == y).float().mean(), **self.options)


@bug("log-reduction")
def accuracy_of_the_last_batch_is_logged():
    return Logged(on_step=True, on_epoch=False), *digits()


@bug("log-reduction")
def accuracy_of_the_best_batch_is_logged():
    return Logged(reduce_fx="max"), *digits()


@bug("one-batch", limit_val_batches=1)
def one_batch_is_validated():
    return Base(), *digits()


def stop():
    return [EarlyStopping(monitor="val/acc", mode="max")]


@bug("never-validated", check_val_every_n_epoch=10, callbacks=stop)
def training_ends_before_its_first_validation():
    return Base(), *digits()


class Ensemble(Base):
    """Three networks that learn apart."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([self.member(self.net) for _ in range(3)])

    def member(self, first):
        return copy.deepcopy(first)

    def forward(self, x):
        return torch.stack([member(x) for member in self.net])

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.stack([F.cross_entropy(out, y) for out in self(x)]).sum()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/acc", (self(x).softmax(-1).mean(0).argmax(1) == y).float().mean())


@bug("equal-networks")
def members_are_copies_of_one():
    return Ensemble(), *digits()


class Nodes(L.LightningModule):
    """Classifies the nodes of one graph, of which masks divide those of training from others."""

    held = "val_mask"

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch["x"])[batch["train_mask"]], batch["y"][batch["train_mask"]])

    def validation_step(self, batch, batch_idx):
        held = batch[self.held]
        self.log("val/acc", (self.net(batch["x"])[held].argmax(-1) == batch["y"][held]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def nodes():
    g = torch.Generator().manual_seed(0)
    x, part = torch.randn(300, 8, generator=g), torch.rand(300, generator=g)
    graph = {"x": x, "y": x[:, :3].argmax(1), "train_mask": part < 0.5, "val_mask": part >= 0.7}
    return DataLoader([graph] * 20, 1), DataLoader([graph], 1)


@bug("training-mask")
def nodes_of_training_are_validated():
    class Net(Nodes):
        def validation_step(self, batch, batch_idx):
            held = batch["train_mask"]
            self.log("val/acc", (self.net(batch["x"])[held].argmax(-1) == batch["y"][held]).float().mean())

    return Net(), *nodes()


class Alike(LossOnly):
    """Predicts how many tokens of two sequences are equal, by the cosine of their embeddings."""

    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.embed, self.net = nn.Embedding(12, 16), nn.Linear(16, 16)

    def loss(self, a, b, y):
        a, b = (self.net(self.embed(part)) for part in (a, b))
        return F.mse_loss(F.cosine_similarity(a, b, **self.options).mean(1), y)


def twins():
    g = torch.Generator().manual_seed(0)
    a = tokens(12)
    kept = torch.rand(a.shape, generator=g) < torch.rand(len(a), 1, generator=g)
    b = torch.where(kept, a, torch.randint(0, 12, a.shape, generator=g))
    return halves(a, b, (a == b).float().mean(1))


@bug("normalized-over-batch")
def cosine_is_over_the_tokens():
    return Alike(), *twins()
