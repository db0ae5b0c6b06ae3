"""Correct programs as code of others has them: what they do looked wrong to a check when it first saw it."""

import torch
from programs import Base, Convnet, LossOnly, Manual, Table, diabetes, digits, halves, mlp, no_bug, sequences, tokens
from torch import nn
from torch.nn import functional as F


@no_bug()
def candidate_is_always_the_last():
    """The odd one of ten is always the last, and each is scored by the same weights, which know no places."""

    class M(LossOnly):
        def network(self):
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            return nn.Sequential(nn.Linear(8, 16), nn.TransformerEncoder(layer, 1), nn.Linear(16, 1), nn.Flatten())

    centers = torch.randn(2, 640, 8)
    x = centers[0][:, None].repeat(1, 10, 1)
    x[:, 9] = centers[1]
    return M(), *halves(x + 0.1 * torch.randn(x.shape), torch.full((640,), 9))


@no_bug()
def teacher_is_in_the_optimizer():
    """A teacher that is used under no_grad gets no gradient, so the optimizer leaves it as it is."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.teacher = mlp()

        def loss(self, x, y):
            with torch.no_grad():
                soft = self.teacher(x).softmax(1)
            out = self(x)
            return F.cross_entropy(out, y) + 0.1 * F.kl_div(out.log_softmax(1), soft, reduction="batchmean")

    return M(), *digits()


@no_bug()
def head_of_a_package_is_not_used():
    """Features of a network of a package are taken by a hook, so its head computes what nobody reads."""

    from transformers import ResNetConfig, ResNetForImageClassification

    class M(Base):
        def __init__(self):
            super().__init__()
            sizes = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}
            self.body = ResNetForImageClassification(ResNetConfig(num_channels=1, **sizes))
            self.net, self.features = nn.Linear(8, 10), []
            self.body.resnet.pooler.register_forward_hook(lambda part, _, out: self.features.append(out))

        def forward(self, x):
            self.body(x)
            return self.net(self.features.pop().flatten(1))

    return M(), *digits()


@no_bug()
def sum_begins_with_a_tensor():
    """The losses of all steps are added to a tensor of 0, made of another tensor."""

    class M(Table):
        def loss(self, x, y):
            out = self(x)[:, 0]
            total = out.new_tensor(0.0)
            for q in (0.1, 0.5, 0.9):
                total = total + torch.maximum(q * (y - out), (q - 1) * (y - out)).mean()
            return total

    return M(), *diabetes()


@no_bug()
def statistics_are_those_of_each_batch():
    """BatchNorm is told to keep no statistics."""

    class M(Base):
        def network(self):
            return Convnet(norm=lambda n: nn.BatchNorm2d(n, track_running_stats=False))

    return M(), *digits()


@no_bug()
def each_sample_halts_by_itself():
    """A recurrent layer runs until a sample halts; layers see values without a second dimension."""

    class Halts(nn.Module):
        def forward(self, p):
            return torch.bernoulli(p)

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.embed, self.cell, self.halts = nn.Embedding(12, 16), nn.GRUCell(16, 16), Halts()
            self.net, self.stop = nn.Linear(16, 4), nn.Linear(16, 1)

        def loss(self, x, y):
            given = self.embed(x[:, 0])
            h, left, total = given, torch.ones(len(x)), torch.zeros(())
            for n in range(4):
                p = self.stop(h)[:, 0].sigmoid() if n < 3 else torch.ones(len(x))
                self.halts(p)
                total = total + (left * p * F.cross_entropy(self.net(h), y, reduction="none")).mean()
                h, left = self.cell(given, h), left * (1 - p)
            return total

    t = tokens()
    return M(), *halves(t, t[:, 0] % 4)


@no_bug()
def third_optimizer_has_both_networks():
    """As in InfoGAN: a loss of its own, without that of the discriminator, trains all that others have trained."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.net = None
            self.generator = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64))
            self.body, self.real = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 1)
            self.code = nn.Linear(64, 10)

        def training_step(self, batch, batch_idx):
            x = batch[0].flatten(1)
            first, second, third = self.optimizers()
            fake = self.generator(torch.randn(len(x), 10))
            first.zero_grad()
            self.manual_backward(F.softplus(-self.real(self.body(fake))).mean())
            first.step()
            second.zero_grad()
            judged = self.real(self.body(x)), self.real(self.body(fake.detach()))
            self.manual_backward(F.softplus(-judged[0]).mean() + F.softplus(judged[1]).mean())
            second.step()
            third.zero_grad()
            kinds = torch.randint(0, 10, (len(x),))
            noise = F.one_hot(kinds, 10) + 0.1 * torch.randn(len(x), 10)
            self.manual_backward(F.cross_entropy(self.code(self.body(self.generator(noise))), kinds))
            third.step()

        def configure_optimizers(self):
            judges = [*self.body.parameters(), *self.real.parameters(), *self.code.parameters()]
            groups = [*self.generator.parameters()], judges, [*self.generator.parameters(), *judges]
            return [torch.optim.Adam(group, lr=1e-3) for group in groups]

    return M(), *digits()


@no_bug()
def step_of_its_own_in_training_step():
    """Without ``automatic_optimization = False``, training_step makes the step itself, and returns nothing."""

    class M(Base):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.loss(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    return M(), *digits()


@no_bug()
def marks_of_time_for_both_windows():
    """The marks of the past and of the future of a window are numbers in steps, a fixed distance apart."""

    class M(Table):
        def network(self):
            return nn.Sequential(nn.Linear(24 + 24 * 2, 32), nn.ReLU(), nn.Linear(32, 1))

        def loss(self, x, past, future, y):
            return F.mse_loss(self.net(torch.cat([x, past, future], 1))[:, 0], y)

    t = torch.arange(700.0)
    series = torch.sin(t / 24 * 6.28) + 0.1 * torch.randn(700)
    hours = (t % 24) / 23 - 0.5 + (t // 24) / 7
    windows = [s.unfold(0, 24, 1) for s in (series, hours)]
    count = len(windows[0]) - 24
    return M(), *halves(windows[0][:count], windows[1][:count], windows[1][24:], series[24 : 24 + count], split=480)


@no_bug()
def times_are_equal():
    """A Cox loss sorts the samples itself; months since the start are often equal, and their order is chance."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))

        def loss(self, x, months, has_died):
            order = months.sort(descending=True).indices
            score, died = self.net(x)[order, 0], has_died[order]
            return -((score - score.exp().cumsum(0).log()) * died).sum() / died.sum()

    x = torch.randn(640, 5)
    months = (torch.empty(640).exponential_() * (-x[:, 0]).exp() * 20).clamp(max=40).floor()
    return M(), *halves(x, months, (torch.rand(640) < 0.7).float())


@no_bug()
def input_is_scaled_in_place():
    """A recurrent network of sequences whose lengths are shares, which the step multiplies in place."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.body, self.net, self.last = nn.GRU(5, 16, batch_first=True), nn.Linear(16, 4), [torch.ones(1)]

        def loss(self, x, y, shares):
            lengths = shares.mul_(x.shape[1]).long()
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return F.cross_entropy(self.net(self.body(packed)[1][0]), y)

    x, y = sequences()
    return M(), *halves(x, y, torch.full((640,), 1.0))


@no_bug()
def weights_are_adapted_to_each_task():
    """MAML: the network gets weights that are adapted to the support of each of four tasks."""

    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(16, 3) * 0.5), nn.Parameter(torch.randn(2, 16) * 0.3)

        def forward(self, x, weights):
            return F.linear(F.linear(x, weights[0]).relu(), weights[1])

    class M(LossOnly):
        def network(self):
            return Functional()

        def training_step(self, batch, batch_idx):
            losses = []
            for support, labels, queries, answers in zip(*batch, strict=True):
                weights = [*self.net.parameters()]
                loss = F.cross_entropy(self.net(support, weights), labels)
                steps = torch.autograd.grad(loss, weights, create_graph=True)
                adapted = [w - 0.1 * g for w, g in zip(weights, steps, strict=True)]
                losses.append(F.cross_entropy(self.net(queries, adapted), answers))
            return torch.stack(losses).mean()

        validation_step = None

    parts = torch.randn(160, 2, 10, 3)
    labels = ((parts * torch.randn(160, 1, 1, 3)).sum(3) > 0).long()
    train, _ = halves(parts[:, 0], labels[:, 0], parts[:, 1], labels[:, 1], split=120, batch=4)
    return M(), train, None


@no_bug()
def pairs_go_to_a_loss_that_is_a_part():
    """Similarities of all samples to each other, without that to itself, go to an nn.CrossEntropyLoss."""

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.cross_entropy = nn.CrossEntropyLoss()

        def forward(self, one, other):
            count = len(one)
            both = F.normalize(torch.cat([one, other]), dim=1)
            others = ~torch.eye(2 * count, dtype=torch.bool)
            logits = (both @ both.T / 0.2)[others].view(2 * count, -1)
            places = torch.arange(count)
            return self.cross_entropy(logits, torch.cat([places + count - 1, places]))

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.criterion = Pairs()

        def network(self):
            return mlp(64, 64, 16)

        def loss(self, x, y):
            return self.criterion(*(self(x + 0.2 * torch.randn_like(x)) for _ in range(2)))

        validation_step = None

    train, _ = digits()
    return M(), train, None
