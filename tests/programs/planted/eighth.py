"""Bugs of a second set whose writer did not know the checks, which no check named before: docs/diagnosis.md counts."""

import torch
from programs import Base, LossOnly, Manual, bug, digits, halves, loaders, mlp, segments, sequences, tokens
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import binary_f1_score


class Heads(LossOnly):
    """Attention of four heads, by einsum."""

    over, joined = -1, True

    def network(self):
        return nn.ModuleList([nn.Embedding(12, 32), nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 4)])

    def forward(self, x):
        embedding, project, out, head = self.net
        b, t = x.shape
        q, k, v = project(embedding(x)).view(b, t, 3, 4, 8).permute(2, 0, 3, 1, 4)
        weights = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(self.over)
        found = torch.einsum("bhqk,bhkd->bhqd", weights, v)
        found = found.transpose(1, 2).reshape(b, t, 32) if self.joined else found.contiguous().view(b, t, 32)
        return head(out(found).mean(1))


def firsts():
    """Tokens, and the first modulo 4."""
    x = tokens()
    return halves(x, x[:, 0] % 4)


@bug("weights-of-queries")
def einsum_of_queries():
    """Softmax over the queries, and an einsum over the keys."""

    class M(Heads):
        over = -2

    return M(), *firsts()


@bug("reshape-not-transpose")
def heads_are_not_transposed():
    """Heads are joined by a view, without transpose."""

    class M(Heads):
        joined = False

    return M(), *firsts()


class Denoiser(LossOnly):
    """Predicts the noise of a diffusion of 100 steps."""

    cumulative = True

    def network(self):
        return nn.Sequential(nn.Linear(11, 64), nn.SiLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def loss(self, x):
        alphas = 1 - torch.linspace(1e-4, 0.06, 100)
        alphas = alphas.cumprod(0) if self.cumulative else alphas
        t = torch.randint(0, 100, (len(x),))
        a, noise = alphas[t].unsqueeze(-1), torch.randn_like(x)
        noised = a.sqrt() * x + (1 - a).sqrt() * noise
        return F.mse_loss(self.net(torch.cat([noised, t[:, None] / 100], 1)), noise)


@bug("little-noise")
def alpha_of_one_step():
    """Noise of one step in place of the cumulative product."""

    class M(Denoiser):
        cumulative = False

    return M(), *halves(torch.randn(640, 10, generator=torch.Generator().manual_seed(0)))


class ActorCritic(Base):
    """A bandit with a value as the baseline."""

    detached = True

    def network(self):
        return nn.ModuleList([nn.Linear(8, 32), nn.Linear(32, 4), nn.Linear(32, 1)])

    def training_step(self, batch, batch_idx):
        body, policy, value = self.net
        hidden = body(batch).tanh()
        actions = Categorical(logits=policy(hidden))
        action = actions.sample()
        reward = batch[:, :4].gather(1, action[:, None])[:, 0]
        found = value(hidden)[:, 0]
        advantage = reward - (found.detach() if self.detached else found)
        return -(actions.log_prob(action) * advantage).mean() + 0.5 * F.mse_loss(found, reward)

    def validation_step(self, batch, batch_idx):
        self.log("val/value", self.net[2](self.net[0](batch).tanh()).mean())


@bug("advantage-gradient")
def advantage_has_a_gradient():
    """The advantage is not detached."""

    class M(ActorCritic):
        detached = False

    return M(), *halves(torch.randn(640, 8, generator=torch.Generator().manual_seed(0)))


class Edges(LossOnly):
    """Graphs whose nodes are the times of a series, each of which has an edge to the next."""

    to_source = scatters = False

    def network(self):
        return nn.ModuleList([nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(32, 4)])

    def forward(self, x):
        embed, message, head = self.net
        count, length = x.shape[:2]
        h = embed(x).relu().flatten(0, 1)
        source = torch.arange(len(h)).view(count, length)[:, :-1].repeat(1, 2).flatten()
        index, messages = source if self.to_source else source + 1, message(h[source])
        if self.scatters:
            sums = torch.zeros_like(h).scatter_add(0, index[:, None].expand_as(messages), messages)
        else:
            sums = torch.zeros_like(h).index_add(0, index, messages)
        return head(torch.cat([h, sums], 1).view(count, length, -1).mean(1))


@bug("own-messages")
def messages_return():
    """Messages of sources are added up at the sources."""

    class M(Edges):
        to_source = True

    return M(), *halves(*sequences())


@bug("own-messages")
def messages_are_scattered_back():
    """The same by scatter_add."""

    class M(Edges):
        to_source = scatters = True

    return M(), *halves(*sequences())


class Focal(Base):
    """The focal loss."""

    reduction = "none"

    def loss(self, x, y):
        loss = F.cross_entropy(self(x), y, reduction=self.reduction)
        return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


@bug("mean-probability")
def focal_loss_of_the_mean():
    """The factor of the focal loss is one of the whole batch."""

    class M(Focal):
        reduction = "mean"

    return M(), *digits()


class Boxes(LossOnly):
    """Predicts boxes by their overlap."""

    corners = True

    def network(self):
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4), nn.Sigmoid())

    def loss(self, x, box):
        if self.corners:
            box = torch.cat([box[:, :2] - box[:, 2:] / 2, box[:, :2] + box[:, 2:] / 2], 1)
        found = self(x)
        found = torch.cat([found[:, :2] - found[:, 2:] / 2, found[:, :2] + found[:, 2:] / 2], 1)
        areas = [(b[:, 2] - b[:, 0]).clamp(min=0) * (b[:, 3] - b[:, 1]).clamp(min=0) for b in (found, box)]
        least = (torch.min(found[:, 2:], box[:, 2:]) - torch.max(found[:, :2], box[:, :2])).clamp(min=0).prod(1)
        return (1 - least / (areas[0] + areas[1] - least + 1e-6)).mean() + F.l1_loss(found, box)


def boxes():
    """Inputs, and centers and sizes of boxes."""
    g = torch.Generator().manual_seed(0)
    box = torch.cat([0.3 + 0.4 * torch.rand(640, 2, generator=g), 0.1 + 0.2 * torch.rand(640, 2, generator=g)], 1)
    return halves(torch.cat([box, torch.randn(640, 6, generator=g)], 1), box)


@bug("box-format")
def centers_for_corners():
    """Centers and sizes are taken for corners."""

    class M(Boxes):
        corners = False

    return M(), *boxes()


class Clipped(Manual):
    """Clips its gradients."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        optimizer.step()


@bug("clipped-too-early")
def clipped_before_backward():
    """Gradients are clipped before they are computed."""

    class M(Manual):
        def training_step(self, batch, batch_idx):
            loss, optimizer = self.loss(*batch), self.optimizers()
            optimizer.zero_grad()
            nn.utils.clip_grad_norm_(self.parameters(), 0.5)
            self.manual_backward(loss)
            optimizer.step()

    return M(), *digits()


class Recurrent(Base):
    """A GRU on padded sequences, validated by its accuracy alone."""

    reads_lengths = True

    def network(self):
        return nn.ModuleList([nn.Embedding(12, 16, padding_idx=0), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 4)])

    def forward(self, x, lengths):
        embed, gru, head = self.net
        found, _ = gru(embed(x))
        return head(found[torch.arange(len(x)), lengths - 1] if self.reads_lengths else found[:, -1])

    def training_step(self, batch, batch_idx):
        x, lengths, y = batch
        return F.cross_entropy(self(x, lengths), y)

    def validation_step(self, batch, batch_idx):
        x, lengths, y = batch
        self.log("val/acc", (self(x, lengths).argmax(1) == y).float().mean())


def ragged(collate):
    """Sequences of unequal length, and the last token modulo 4."""
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 12, (int(n),), generator=g) for n in torch.randint(4, 30, (640,), generator=g)]
    items = [(each, int(each[-1]) % 4) for each in ids]
    return loaders(items[:480], items[480:], collate_fn=collate)[0], DataLoader(items[480:], 32, collate_fn=collate)


def joined(samples, order=None):
    """Pad a batch, in the order of the inputs if one is given."""
    ids = sorted((x for x, _ in samples), key=len, reverse=True) if order == "inputs" else [x for x, _ in samples]
    labels = torch.tensor([y for _, y in samples])
    return pad_sequence(ids, batch_first=True), torch.tensor([len(x) for x in ids]), labels


@bug("masked-matters")
def last_state_is_padding():
    """The state after the padding is read."""

    class M(Recurrent):
        reads_lengths = False

    return M(), *ragged(joined)


@bug("misaligned-batch")
def only_inputs_are_sorted():
    """collate_fn sorts the inputs, and not the labels."""
    return Recurrent(), *ragged(lambda samples: joined(samples, "inputs"))


@bug("mixing")
def statistics_of_the_batch_beside_accuracy():
    """Samples are standardized by those beside them, also in a validation that has no loss function."""

    class M(Base):
        def forward(self, x):
            return self.net((x - x.mean(0)) / (x.std(0) + 1))

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/acc", (self(x).argmax(1) == y).float().mean())

    return M(), *digits()


class Rare(LossOnly):
    """A rare class, and its F1 of each batch."""

    name = "val/f1"

    def network(self):
        return mlp(24, 32, 1)

    def loss(self, x, y):
        return F.binary_cross_entropy_with_logits(self(x)[:, 0], y.float())

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log(self.name, binary_f1_score(self(x)[:, 0].sigmoid(), y))


def rare():
    """A table with a rare class."""
    x = torch.randn(640, 24, generator=torch.Generator().manual_seed(0))
    return halves(x, (x[:, 0] + x[:, 1] > 1.8).long())


@bug("averaged-metric")
def f1_of_batches():
    """The mean of the F1 of each batch is logged as F1."""
    return Rare(), *rare()


class OwnCoins(torch.utils.data.Dataset):
    """Pictures that are flipped at random, and masks of 0.0 and 1.0."""

    joint = False

    def __init__(self, x, y):
        self.x, self.y = x, y.float()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        coin = torch.rand(2)
        x = self.x[i].flip(-2) if coin[0] < 0.5 else self.x[i]
        y = self.y[i].flip(-2) if coin[0 if self.joint else 1] < 0.5 else self.y[i]
        return x, y


class Masks(LossOnly):
    def network(self):
        return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))

    def loss(self, x, y):
        return F.binary_cross_entropy_with_logits(self(x)[:, 0], y)


def masks(kind):
    """Pictures and masks of one class."""
    x, y = segments()
    return loaders(kind(x[:240], y[:240] == 1), TensorDataset(x[240:], (y[240:] == 1).float()))


@bug("target-not-flipped")
def two_coins():
    """Picture and mask are flipped by two coins."""
    return Masks(), *masks(OwnCoins)
