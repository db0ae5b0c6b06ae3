"""The programs of ``planted/nineteenth.py`` without their bugs, and others that look like them."""

import torch
from programs import Base, LossOnly, Table, halves, no_bug
from programs import Causal as Tokens
from programs.planted.nineteenth import (
    Causal,
    Clips,
    Cloze,
    Colors,
    Gaps,
    Loans,
    Measured,
    Messages,
    Mixed,
    Nodes,
    Uncertain,
    Windows,
    clips,
    graphs,
    grids,
    loans,
    numbers,
    one_graph,
    read_bytes,
    tokens,
    waves,
    windows,
)
from torch import nn
from torch.nn import functional as F


def with_values(kind, *args, **values):
    module = kind(*args)
    for name, value in values.items():
        setattr(module, name, value)
    return module


@no_bug()
def mask_of_an_object_is_read():
    return with_values(Nodes, masked=True), *one_graph()


@no_bug()
def mask_is_read_for_metric_and_loss():
    return with_values(Measured, masked=True), *one_graph()


@no_bug()
def labels_of_other_nodes_are_ignored():
    class M(Nodes):
        def training_step(self, graph, batch_idx):
            out, y = self.logits(graph), torch.where(graph.train_mask, graph.y, -100)
            with torch.no_grad():
                self.log("loss/all", F.cross_entropy(out, graph.y), batch_size=1)
            return F.cross_entropy(out, y)

    return M(), *one_graph()


@no_bug()
def first_nodes_are_the_seeds_of_a_batch():
    class M(Nodes):
        def training_step(self, graph, batch_idx):
            seeds = 64
            return F.cross_entropy(self.logits(graph)[:seeds], graph.y[:seeds])

    return M(), *one_graph()


@no_bug()
def bytes_are_permuted():
    return Colors(), *read_bytes(permutes=True)


@no_bug()
def stripes_of_three_rows():
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (640,), generator=g)
    rows = torch.arange(12) * 2 * torch.pi / torch.where(y == 0, 3.0, 6.0)[:, None]
    x = (rows + 6 * torch.rand(640, 1, generator=g)).cos()[:, None, :, None].expand(-1, 3, -1, 12)
    return Colors(), *halves(x + 0.3 * torch.randn(640, 3, 12, 12, generator=g), y)


@no_bug()
def numbers_beside_categories_have_the_scale_of_training():
    return Loans(), *loans(lambda own, train: (own - train.mean(0)) / train.std(0))


class Subjects(Base):
    """Measurements of several subjects, each standardized by itself."""

    def network(self):
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


@no_bug()
def each_subject_is_standardized():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(16, 60, 6, generator=g) * (1 + torch.rand(16, 1, 1, generator=g))
    y = (x[..., 0] > 0.1).long().flatten()
    return Subjects(), *halves(((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)).flatten(0, 1), y, split=720)


@no_bug()
def windows_are_standardized_by_their_inputs():
    return Windows(), *windows(known=24)


@no_bug()
def windows_are_their_own_targets():
    class M(Windows):
        def network(self):
            return nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 24))

        def loss(self, x, y):
            return F.mse_loss(self(x), x)

    return M(), *windows(known=24)


@no_bug()
def soft_labels_are_mixed_alike():
    return with_values(Mixed, same=True), *numbers_of_classes()


def numbers_of_classes():
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 10, (640,), generator=g)
    return halves(torch.randn(640, 1, 8, 8, generator=g) + y[:, None, None, None] / 3, y)


@no_bug()
def messages_are_added_by_index():
    return Messages("index_add"), *graphs()


@no_bug()
def sizes_are_added_by_index():
    return Table(), *grids(adds=True)


@no_bug()
def averages_of_classes_have_the_last_sample():
    class M(Base):
        def __init__(self):
            super().__init__()
            self.register_buffer("means", torch.zeros(10, 64))

        def loss(self, x, y):
            self.means[y] += 0.1 * (x.flatten(1) - self.means[y])
            return super().loss(x, y) + 0 * self.means.sum()

    return M(), *numbers_of_classes()


@no_bug()
def passes_with_active_dropout():
    return with_values(Uncertain, active=True), *numbers()


@no_bug()
def adapters_that_begin_at_zero():
    class M(Uncertain):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.randn(6, 10, 2))
            self.second = nn.Parameter(torch.zeros(6, 2, 1))

        def member(self, x, k):
            return (self.net(x) + x @ self.first[k] @ self.second[k])[:, 0]

        def loss(self, x, y):
            return sum(F.mse_loss(self.member(x, k), y) for k in range(6))

        def validation_step(self, batch, batch_idx):
            x, y = batch
            out = torch.stack([self.member(x, k) for k in range(6)])
            self.log_dict({"val/error": (out.mean(0) - y).abs().mean(), "val/spread": out.std(0).mean()})

    return M(), *numbers()


@no_bug()
def labels_are_copied_before_masking():
    return with_values(Cloze, copied="before"), *halves(tokens())


@no_bug()
def gaps_have_the_values_before():
    return with_values(Gaps, copies=True), *numbers()


@no_bug()
def convolution_is_cut_at_the_end():
    return with_values(Causal, centered=False), *waves()


@no_bug()
def own_last_time_is_read():
    return with_values(Clips, own_end=True), *clips()


@no_bug()
def hidden_parts_of_standardized_series():
    """What is hidden is drawn at random, so a statistic of the whole is that of what the network may see."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 12))

        def loss(self, x):
            order = torch.randperm(32)
            return F.mse_loss(self.net(x[:, order[:20]]), x[:, order[20:]])

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    x = torch.randn(640, 32, generator=torch.Generator().manual_seed(0)).cumsum(1)
    return M(), *halves((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True))


@no_bug()
def tokens_of_one_kind_are_reconstructed():
    class M(Tokens):
        causal = False

        def loss(self, x):
            hidden = self.body(self.embed(x)).mean(1, keepdim=True) + self.places(torch.arange(16))
            return F.cross_entropy(self.net(hidden).flatten(0, 1), x.flatten(), ignore_index=0)

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    g = torch.Generator().manual_seed(0)
    x = torch.randint(1, 12, (640, 16), generator=g).where(torch.rand(640, 16, generator=g) < 0.3, torch.tensor(1))
    return M(), *halves(x.where(torch.rand(640, 16, generator=g) < 0.6, torch.tensor(0)))


@no_bug()
def coordinates_in_steps():
    class M(Table):
        def network(self):
            return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    x = torch.cat([torch.linspace(0, 1, 480), torch.linspace(0, 1, 160)])[:, None]
    return M(), *halves(x, (9 * x[:, 0]).sin())


@no_bug()
def series_without_their_ends_are_reconstructed():
    class M(Causal):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Conv1d(3, 2, 3), nn.Conv1d(2, 3, 1)
            self.centered = False

        def loss(self, x):
            smooth = F.avg_pool1d(x, 3, 1) - x[..., 1:-1]
            self.log("rough", smooth.square().mean())
            return super().loss(x) + F.mse_loss(self.outer(self.inner(x).relu()), x[..., 1:-1])

    return M(), *waves()


@no_bug()
def one_edge_for_each_target():
    class M(Messages):
        def sums(self, values, index, count):
            out = values.new_zeros(count, values.shape[1])
            first = torch.full((count,), len(index)).scatter_reduce(0, index, torch.arange(len(index)), "amin")
            edges = first[first < len(index)]
            out[index[edges]] += values[edges]
            return out

    return M(), *graphs()
