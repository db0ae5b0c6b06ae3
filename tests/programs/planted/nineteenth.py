"""Bugs of pairs of programs by a writer who had seen neither checks nor programs: the kinds, in other forms."""

import numpy as np
import torch
from programs import Base, LossOnly, Table, bug, digits, halves, sequences, tokens
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Graph:
    """A graph as an object of a class of its own."""

    def __init__(self):
        x, self.y = next(iter(digits(400, batch=400)[0]))
        self.x = x.flatten(1)
        self.near = torch.cdist(self.x, self.x).topk(6, largest=False).indices
        order = torch.randperm(400, generator=torch.Generator().manual_seed(1))
        self.train_mask, self.val_mask = order < 150, order >= 250


class Nodes(Base):
    """Classifies nodes of which a mask says which are of training."""

    masked = False

    def logits(self, graph):
        return self.net(graph.x[graph.near].mean(1))

    def training_step(self, graph, batch_idx):
        rows = graph.train_mask if self.masked else slice(None)
        return F.cross_entropy(self.logits(graph)[rows], graph.y[rows])

    def validation_step(self, graph, batch_idx):
        right = self.logits(graph).argmax(1) == graph.y
        self.log("val/acc", right[graph.val_mask].float().mean(), batch_size=1)


def one_graph():
    graph = Graph()
    return [DataLoader([graph] * 8, batch_size=None) for _ in range(2)]


@bug("unused-part")
def mask_of_an_object_is_not_read():
    return Nodes(), *one_graph()


class Measured(Nodes):
    """The mask is read for a metric, too."""

    def training_step(self, graph, batch_idx):
        right = self.logits(graph).argmax(1) == graph.y
        self.log("train/acc", right[graph.train_mask].float().mean(), batch_size=1)
        return super().training_step(graph, batch_idx)


@bug("unused-part")
def mask_is_read_for_a_metric_only():
    return Measured(), *one_graph()


class Colors(Base):
    """Classifies small pictures by the color of a square in them."""

    def network(self):
        conv = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        return nn.Sequential(conv, nn.Flatten(), nn.Linear(8, 10))


def colored(count=600):
    """Bytes (N, H, W, 3) and classes."""
    g = np.random.default_rng(0)
    y = g.integers(0, 3, count)
    x = g.integers(40, 160, (count, 12, 12, 3))
    for n in range(count):
        a, b = g.integers(0, 7, 2)
        x[n, a : a + 5, b : b + 5, y[n]] = 230
    return x.astype(np.uint8), torch.tensor(y)


class Bytes(Dataset):
    """Reads pictures whose channels are last."""

    def __init__(self, x, y, permutes=False):
        self.x, self.y, self.permutes = x, y, permutes

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = torch.from_numpy(self.x[i])
        return (x.permute(2, 0, 1) if self.permutes else x.reshape(3, 12, 12)).float() / 255, self.y[i]


def read_bytes(permutes):
    x, y = colored()
    parts = [Bytes(x[rows], y[rows], permutes) for rows in (slice(480), slice(480, None))]
    return DataLoader(parts[0], 32, shuffle=True), DataLoader(parts[1], 32)


@bug("reshape-not-transpose")
def bytes_are_reshaped_in_the_dataset():
    return Colors(), *read_bytes(permutes=False)


@bug("reshape-not-transpose")
def array_is_reshaped_before_the_dataset():
    x, y = colored()
    return Colors(), *halves(torch.tensor(x.reshape(-1, 3, 12, 12)).float() / 255, y)


class Loans(LossOnly):
    """A table of numbers and a category."""

    def __init__(self):
        super().__init__()
        self.kinds, self.net = nn.Embedding(4, 4), nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss(self, batch):
        x = torch.cat([batch["numbers"], self.kinds(batch["kind"])], 1)
        return F.binary_cross_entropy_with_logits(self.net(x)[:, 0], batch["label"])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


def loans(scale):
    """Samples of both splits, of which the second one has other values, scaled by a function of (own, of training)."""
    parts = []
    for seed, count in ((0, 480), (1, 160)):
        g = np.random.default_rng(seed)
        x = g.normal((40 + 9 * seed, 10, 3), (8, 4 + seed, 1), (count, 3))
        kind = g.integers(0, 4, count)
        y = (x[:, 0] / 8 - x[:, 1] / 4 + kind + g.normal(size=count) > 4).astype(np.float32)
        parts.append((x, kind, y))
    return [
        DataLoader(
            [
                {"numbers": torch.tensor(row).float(), "kind": int(k), "label": label}
                for row, k, label in zip(scale(x, parts[0][0]), kind, y, strict=True)
            ],
            32,
            shuffle=not i,
        )
        for i, (x, kind, y) in enumerate(parts)
    ]


@bug("own-scale")
def numbers_beside_categories_are_scaled_by_split():
    return Loans(), *loans(lambda own, train: (own - own.mean(0)) / own.std(0))


@bug("own-scale")
def each_split_has_its_own_range():
    return Loans(), *loans(lambda own, train: (own - own.min(0)) / (own.max(0) - own.min(0)))


class Windows(LossOnly):
    """Predicts the next six values of 24."""

    def network(self):
        return nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 6))

    def loss(self, x, y):
        return (self(x) - y).abs().mean()


def windows(known):
    """Windows of a random walk, standardized by their first values, and the values that follow."""
    g = torch.Generator().manual_seed(0)
    series = torch.randn(1400, generator=g).cumsum(0) + 4 * torch.sin(torch.arange(1400) * 0.5)
    w = series.unfold(0, 30, 2)
    z = (w - w[:, :known].mean(1, keepdim=True)) / (w[:, :known].std(1, keepdim=True) + 1e-4)
    return halves(z[:, :24].clone(), z[:, 24:].clone())


@bug("future-leak")
def windows_are_standardized_with_their_targets():
    return Windows(), *windows(known=30)


class Mixed(Base):
    """Mixes inputs and labels, and has a loss of its own."""

    same = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        share, order = float(np.random.beta(0.5, 0.5)), torch.randperm(len(x))
        other = order if self.same else torch.randperm(len(x))
        soft = F.one_hot(y, 10).float()
        x, soft = share * x + (1 - share) * x[order], share * soft + (1 - share) * soft[other]
        return -(soft * self(x).log_softmax(1)).sum(1).mean()


@bug("mixed-labels")
def soft_labels_are_mixed_with_other_samples():
    return Mixed(), *digits()


class Messages(LossOnly):
    """Sums messages along the edges of a batch of graphs."""

    def __init__(self, kind="add"):
        super().__init__()
        self.kind, self.embed, self.net, self.head = kind, nn.Embedding(5, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def sums(self, values, index, count):
        out = values.new_zeros(count, values.shape[1])
        if self.kind == "add":
            out[index] += values
        elif self.kind == "put":
            out = out.index_put((index,), out[index] + values)
        else:
            out = out.index_add(0, index, values)
        return out

    def loss(self, z, edges, owner, y):
        h = self.embed(z)
        h = h + self.sums(self.net(h[edges[0]]).relu(), edges[1], len(z))
        return F.mse_loss(torch.zeros(len(y)).index_add(0, owner, self.head(h)[:, 0]), y)


def trees(count=320):
    """Random trees, whose target is a sum over edges."""
    g, found = np.random.default_rng(0), []
    for _ in range(count):
        z = g.integers(0, 5, g.integers(5, 10))
        pairs = np.array([(g.integers(0, i), i) for i in range(1, len(z))]).T
        found.append((torch.tensor(z), torch.tensor(pairs), float((z[pairs[0]] * z[pairs[1]]).sum() / 20)))
    return found


def join(graphs):
    shifts = np.cumsum([0, *(len(z) for z, _, _ in graphs)])
    edges = torch.cat([pairs + int(shift) for (_, pairs, _), shift in zip(graphs, shifts[:-1], strict=True)], 1)
    owner = torch.cat([torch.full((len(z),), n) for n, (z, _, _) in enumerate(graphs)])
    y = torch.tensor([target for _, _, target in graphs])
    return torch.cat([z for z, _, _ in graphs]), torch.cat([edges, edges.flip(0)], 1), owner, y


def graphs():
    found = trees()
    return [DataLoader(part, 16, shuffle=True, collate_fn=join) for part in (found[:240], found[240:])]


@bug("repeated-index")
def messages_are_added_in_place():
    return Messages(), *graphs()


@bug("repeated-index")
def messages_are_put_without_accumulate():
    return Messages("put"), *graphs()


class Points(Dataset):
    """Points of several kinds, whose sizes are added up in the cells of a grid."""

    def __init__(self, rows, adds=False):
        g = torch.Generator().manual_seed(0)
        self.cells = torch.randint(0, 10, (640, 30), generator=g)[rows]
        self.sizes, self.adds = torch.rand(640, 30, generator=g)[rows], adds

    def __len__(self):
        return len(self.cells)

    def __getitem__(self, i):
        grid = torch.zeros(10)
        if self.adds:
            grid.index_add_(0, self.cells[i], self.sizes[i])
        else:
            grid[self.cells[i]] += self.sizes[i]
        return grid, self.sizes[i][self.cells[i] < 3].sum()


def grids(adds):
    parts = [Points(rows, adds) for rows in (slice(480), slice(480, None))]
    return DataLoader(parts[0], 32, shuffle=True), DataLoader(parts[1], 32)


@bug("repeated-index")
def sizes_are_added_in_a_dataset():
    return Table(), *grids(adds=False)


class Uncertain(Table):
    """Predicts several times with dropout, and logs the deviation."""

    active = False

    def network(self):
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.net[2].train(self.active)
        out = torch.stack([self(x)[:, 0] for _ in range(10)])
        self.net[2].eval()
        self.log_dict({"val/error": (out.mean(0) - y).abs().mean(), "val/spread": out.std(0).mean()})


class Repeated(Uncertain):
    """All passes are one."""

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.net[2].train(self.active)
        out = self(x.repeat(10, 1)).view(10, len(x))
        self.net[2].eval()
        self.log_dict({"val/error": (out.mean(0) - y).abs().mean(), "val/spread": out.var(dim=0).mean()})


def numbers():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(640, 10, generator=g)
    return halves(x, x[:, 0] - x[:, 1] * x[:, 2])


@bug("same-passes")
def passes_with_dropout_are_equal():
    return Uncertain(), *numbers()


@bug("same-passes")
def one_pass_of_copies_is_equal():
    return Repeated(), *numbers()


class Cloze(LossOnly):
    """Predicts tokens that are masked."""

    copied = "after"

    def __init__(self):
        super().__init__()
        self.embed, self.places, self.net = nn.Embedding(13, 32), nn.Embedding(16, 32), nn.Linear(32, 13)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 1)

    def forward(self, x):
        return self.net(self.body(self.embed(x) + self.places(torch.arange(x.shape[1]))))

    def loss(self, x):
        hidden, before = torch.rand(x.shape) < 0.2, x
        x = x.masked_fill(hidden, 12)
        labels = (x if self.copied == "after" else before).masked_fill(~hidden, -100)
        return F.cross_entropy(self(x).flatten(0, 1), labels.flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


@bug("masked-targets")
def labels_are_copied_after_masking():
    return Cloze(), *halves(tokens())


class Gaps(Table):
    """Predicts values that are replaced by 0."""

    copies = False

    def network(self):
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 10))

    def loss(self, x, y):
        before = x
        x, hidden = x.clone(), torch.rand_like(x) < 0.3
        x[hidden] = 0
        return F.mse_loss(self(x)[hidden], (before if self.copies else x)[hidden])


@bug("masked-targets")
def gaps_are_the_targets_of_gaps():
    return Gaps(), *numbers()


class Causal(LossOnly):
    """At each time, predicts the next value of a series (N, C, T)."""

    centered = True

    def __init__(self):
        super().__init__()
        self.conv, self.net = nn.Conv1d(3, 16, 3, padding=2), nn.Conv1d(16, 3, 1)

    def forward(self, x):
        h = self.conv(x)
        return self.net((h[..., 2:] if self.centered else h[..., :-2]).relu())

    def loss(self, x):
        return (self(x[..., :-1]) - x[..., 1:]).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


def waves():
    g = torch.Generator().manual_seed(0)
    times = torch.arange(24) * 0.4 + 6 * torch.rand(640, 3, 1, generator=g)
    return halves(times.sin() + 0.2 * torch.randn(640, 3, 24, generator=g))


@bug("future-leak")
def convolution_is_cut_at_the_wrong_end():
    return Causal(), *waves()


class Clips(Base):
    """Classifies sequences of several lengths by the state at their end."""

    own_end = False

    def network(self):
        return nn.GRU(5, 16, batch_first=True)

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 4)

    def forward(self, batch):
        packed = nn.utils.rnn.pack_padded_sequence(batch["x"], batch["n"], batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.net(packed)[0], batch_first=True)
        return self.head(out[torch.arange(len(out)), batch["n"] - 1] if self.own_end else out[:, -1])

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch), batch["y"])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx), batch_size=len(batch["y"]))


def clips():
    x, y = sequences()
    sizes = torch.randint(5, 13, (len(x),), generator=torch.Generator().manual_seed(0))
    rows = [{"x": a[:n], "y": b} for a, b, n in zip(x, y, sizes.tolist(), strict=True)]
    return [DataLoader(part, 32, shuffle=True, collate_fn=pad) for part in (rows[:480], rows[480:])]


def pad(rows):
    lengths = torch.tensor([len(row["x"]) for row in rows])
    x = nn.utils.rnn.pad_sequence([row["x"] for row in rows], batch_first=True)
    return {"x": x, "n": lengths, "y": torch.stack([row["y"] for row in rows])}


@bug("padded-output")
def last_time_is_that_of_the_padding():
    return Clips(), *clips()
