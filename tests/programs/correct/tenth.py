"""Correct programs that are close to the bugs of ``planted/tenth.py``."""

import math

import numpy as np
import torch
from programs import Base, LossOnly, digits, halves, mlp, no_bug, tokens
from programs.planted.ninth import Flow, points, scaled
from programs.planted.tenth import (
    Autoencoder,
    Counted,
    Diffusion,
    Links,
    Pair,
    Pooled,
    Prototypes,
    Rare,
    Rated,
    Ratings,
    Scored,
    Target,
    Topics,
    Translation,
    Views,
    Weighted,
    binary,
    episodes,
    events,
    frames,
    links,
    pairs_of_nodes,
    ratings,
    sentences,
    topics,
    unequal,
)
from sklearn.metrics import confusion_matrix, f1_score, recall_score
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics import SumMetric


@no_bug()
def norms_of_tasks_are_measured():
    """Gradients of each task are cleared after they were measured, before those of the sum are computed."""

    class M(Pair):
        def training_step(self, batch, batch_idx):
            optimizer, losses = self.optimizers(), self.losses(*batch)
            for loss in losses:
                optimizer.zero_grad()
                self.manual_backward(loss, retain_graph=True)
                self.log("norm", sum(p.grad.norm() for p in self.parameters() if p.grad is not None))
            optimizer.zero_grad()
            self.manual_backward(sum(losses))
            optimizer.step()

    return M(), *digits()


@no_bug()
def gradients_of_tasks_are_kept():
    """Gradients of each task are cleared after they were copied, and the step is by their mean."""

    class M(Pair):
        def training_step(self, batch, batch_idx):
            optimizer, kept = self.optimizers(), []
            for k in range(2):
                optimizer.zero_grad()
                self.manual_backward(self.losses(*batch)[k])
                kept.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])
            for p, grads in zip(self.parameters(), zip(*kept, strict=True), strict=True):
                p.grad = sum(g for g in grads if g is not None) / 2
            optimizer.step()

    return M(), *digits()


@no_bug()
def adversarial_samples_by_backward():
    """The gradients of a first pass are only for the inputs."""

    class M(Pair):
        def training_step(self, batch, batch_idx):
            optimizer, (x, y) = self.optimizers(), batch
            x = x.clone().requires_grad_()
            self.manual_backward(sum(self.losses(x, y)))
            x = (x + 0.1 * x.grad.sign()).detach()
            optimizer.zero_grad()
            self.manual_backward(sum(self.losses(x, y)))
            optimizer.step()

    return M(), *digits()


@no_bug(max_epochs=4)
def metric_of_training_is_reset():
    return Counted(), *digits(160)


@no_bug(max_epochs=4)
def metric_is_reset_at_the_start():
    class M(Counted):
        resets = False

        def on_train_epoch_start(self):
            self.accuracy.reset()

    return M(), *digits(160)


@no_bug(max_epochs=4)
def samples_are_counted():
    """A metric counts the samples of all epochs."""

    class M(Counted):
        def __init__(self):
            super().__init__()
            self.count = SumMetric()

        def loss(self, x, y):
            self.count.update(len(x))
            return super().loss(x, y)

        def on_train_epoch_end(self):
            super().on_train_epoch_end()
            self.log("samples", self.count.compute().item())

    return M(), *digits(160)


@no_bug(max_epochs=8)
def hardest_triplets():
    """Chooses triplets of a batch: the farthest of the same class, and the nearest of another one."""

    class M(LossOnly):
        def network(self):
            return mlp(outputs=8)

        def loss(self, x, y):
            z = F.normalize(self(x), dim=1)
            distances, same = torch.cdist(z, z), y[:, None] == y
            inside = same & ~torch.eye(len(y), dtype=torch.bool)
            positive = distances.masked_fill(~inside, -math.inf).amax(1)
            negative = distances.masked_fill(same, math.inf).amin(1)
            known = inside.any(1)
            return F.relu(positive[known] - negative[known] + 0.3).mean()

    return M(), *digits(batch=64)


@no_bug(max_epochs=8)
def margin_is_kept_in_the_end():
    """A margin that all samples keep after some epochs."""

    class M(LossOnly):
        lr = 0.05

        def network(self):
            return nn.Linear(4, 1)

        def loss(self, x, y):
            return F.relu(0.1 - self(x)[:, 0] * y).mean()

    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    x[:, 0] += 3 * x[:, 0].sign()
    return M(), *halves(x, x[:, 0].sign(), split=320, batch=16)


@no_bug(max_epochs=8)
def second_part_begins_later():
    """A part has a loss of weight 0 in the first epochs."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.other = mlp()

        def training_step(self, batch, batch_idx):
            x, y = batch
            late = float(self.current_epoch > 6)
            return F.cross_entropy(self(x), y) + late * F.cross_entropy(self.other(x), y)

    return M(), *digits()


@no_bug(max_epochs=16)
def variational_autoencoder():
    return Autoencoder(), *digits()


@no_bug(max_epochs=16)
def autoencoder_of_noise():
    """Half of the values of white noise pass."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16))

        def loss(self, x, y):
            return F.mse_loss(self(x), x)

    x = torch.randn(700, 16, generator=torch.Generator().manual_seed(0))
    return M(), *halves(x, torch.zeros(700), split=640)


@no_bug(max_epochs=16)
def values_that_cannot_be_predicted():
    """Targets are noise, and no inputs."""

    class M(LossOnly):
        def network(self):
            return nn.Linear(16, 16)

        def loss(self, x, y):
            return F.mse_loss(self(x), y)

    x, y = torch.randn(2, 700, 16, generator=torch.Generator().manual_seed(0))
    return M(), *halves(x, y, split=640)


@no_bug()
def difference_of_fractions():
    return Base(), *frames(wide=True)


class Bytes(Dataset):
    """Bytes that are inverted, shifted by less than their distance to 255, or numbers modulo 97."""

    def __init__(self, count):
        g = np.random.default_rng(count)
        self.data = g.integers(0, 97, (count, 8, 8)).astype(np.uint8)
        self.labels = torch.as_tensor(g.integers(0, 10, count))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x = self.data[index]
        x = (x + x[::-1]) % 97
        x = 255 - x
        return torch.as_tensor(x - x.min())[None] / 255, self.labels[index]


@no_bug()
def arithmetic_within_bytes():
    return Base(), DataLoader(Bytes(320), 32, shuffle=True), DataLoader(Bytes(64), 32)


@no_bug()
def area_under_the_curve():
    return Scored(), *digits()


@no_bug()
def f1_of_labels():
    class M(Scored):
        def score(self, y, p):
            return f1_score(y, p > 0.5)

    return M(), *digits()


@no_bug()
def head_that_begins_with_zeros():
    """All scores are 0 at first."""

    class M(Scored):
        lr = 1e-6

        def __init__(self):
            super().__init__()
            nn.init.zeros_(self.net[-1].weight)
            nn.init.zeros_(self.net[-1].bias)

    return M(), *digits()


@no_bug()
def r2_of_predictions():
    return Rated(), *scaled()


@no_bug()
def recall_of_predictions():
    class M(Scored):
        def score(self, y, p):
            confusion = confusion_matrix(y, p > 0.5, labels=[False, True])
            return recall_score(y, p > 0.5) + confusion[1, 1]

    return M(), *digits()


@no_bug()
def perfect_predictions():
    """What is predicted is what is expected."""

    class M(Scored):
        def score(self, y, p):
            return recall_score(y, y.copy())

    return M(), *digits()


@no_bug()
def all_terms_are_sums():
    """Both terms of a density are summed over the batch."""

    class M(Flow):
        def loss(self, x):
            return len(x) * super().loss(x)

    return M(), *points()


@no_bug()
def sum_and_penalty_of_weights():
    """A sum over samples, and a penalty of the weights."""

    class M(LossOnly):
        lr = 1e-4

        def loss(self, x, y):
            return F.cross_entropy(self(x), y, reduction="sum") + sum(p.square().sum() for p in self.parameters())

    return M(), *digits()


@no_bug()
def noisy_mean_and_penalty():
    """A mean over noisy samples, and a penalty of their outputs."""

    class M(LossOnly):
        def loss(self, x, y):
            out = self(x + 0.3 * torch.randn_like(x))
            return F.cross_entropy(out, y) + 0.1 * out.square().mean()

    return M(), *digits()


@no_bug()
def views_are_joined():
    return Views(), *digits()


@no_bug()
def views_are_side_by_side():
    """Views of a sample follow one another."""

    class M(Views):
        def join(self, one, other):
            return torch.stack([one, other], 1).flatten(0, 1)

        def pairs(self, count):
            return torch.arange(count) ^ 1

    return M(), *digits()


@no_bug()
def as_many_classes_as_samples():
    """Ten classes, and ten samples in a batch."""
    return LossOnly(), *digits(batch=10)


@no_bug()
def two_networks_of_pairs():
    """Two networks, and a similarity for each pair, of which the diagonal is meant."""

    class M(LossOnly):
        def network(self):
            return nn.ModuleList([mlp(outputs=16), mlp(outputs=16)])

        def loss(self, x, y):
            one, other = (F.normalize(net(x), dim=1) for net in self.net)
            return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(x)))

    return M(), *digits()


@no_bug()
def messages_along_edges_of_training():
    return Links(), *links()


@no_bug()
def known_edges_are_left_out_of_ranks():
    """All edges are known, and only hide what is no mistake from the ranking."""

    class M(Links):
        def __init__(self):
            super().__init__()
            edges = torch.cat([pairs[labels == 1] for pairs, labels in pairs_of_nodes()])
            self.register_buffer("known", torch.zeros(60, 60))
            self.known[edges[:, 0], edges[:, 1]] = 1

        def validation_step(self, batch, batch_idx):
            pairs, _ = batch
            hidden = self.net(self.graph @ self.features)
            scores = (hidden @ hidden.T).masked_fill(self.known.bool(), -math.inf)
            own = self(pairs)
            self.log("val/rank", (scores[pairs[:, 0]] > own[:, None]).sum(1).float().mean())

    return M(), *links()


@no_bug()
def queries_of_other_samples():
    return Prototypes(), *episodes()


class Windows(Dataset):
    """What a decoder gets begins with the end of what an encoder gets."""

    def __init__(self, count):
        self.series = torch.randn(count + 40, 16, generator=torch.Generator().manual_seed(0)).cumsum(0)
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.series[index : index + 12], self.series[index + 6 : index + 16]


@no_bug()
def windows_that_overlap():
    class M(LossOnly):
        def network(self):
            return nn.Linear(16, 16)

        def training_step(self, batch, batch_idx):
            past, window = batch
            return F.mse_loss(self(past.mean(1))[:, None].expand(-1, 4, -1), window[:, 6:])

        def validation_step(self, batch, batch_idx):
            pass

    return M(), DataLoader(Windows(320), 32, shuffle=True), DataLoader(Windows(64), 32)


@no_bug()
def weights_are_inverse_sizes():
    return Weighted(), *unequal()


@no_bug()
def weights_are_costs():
    """The class that matters most is neither the rarest nor the most frequent."""

    class M(Weighted):
        def weights(self, counts):
            return torch.tensor([2.0, 5.0, 1.0])

    return M(), *unequal()


@no_bug()
def weights_of_effective_numbers():
    class M(Weighted):
        def weights(self, counts):
            return (1 - 0.99) / (1 - 0.99**counts)

    return M(), *unequal()


@no_bug()
def rare_class_weighs_more():
    return Rare(), *binary()


@no_bug()
def topics_of_tokens():
    x, y = topics()
    return Topics(), *halves(x, y, split=400)


@no_bug()
def topics_at_random():
    """Labels that no token tells."""
    x, y = topics()
    return Topics(), *halves(x, y[torch.randperm(500, generator=torch.Generator().manual_seed(1))], split=400)


@no_bug()
def translation():
    return Translation(), *sentences()


@no_bug()
def autoencoder_of_sentences():
    """An encoder gets all tokens, and a decoder the earlier ones."""

    class M(Translation):
        def loss(self, x, y):
            return super().loss(y, y)

    return M(), *sentences()


@no_bug()
def next_token_of_all():
    """A recurrent model of the next token shifts its batch itself."""

    class M(LossOnly):
        def network(self):
            return nn.ModuleList([nn.Embedding(12, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 12)])

        def loss(self, x):
            embed, body, head = self.net
            return F.cross_entropy(head(body(embed(x[:, :-1]))[0]).transpose(1, 2), x[:, 1:])

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    return M(), *halves(tokens())


@no_bug()
def attention_over_events():
    return Pooled(), *events()


@no_bug()
def first_event_only():
    """A model of the first event beside how many there are."""

    class M(Pooled):
        def forward(self, x, count):
            body, _, head = self.net
            return head(body(x[:, 0]).relu() + count[:, None] / 8)

    return M(), *events()


@no_bug()
def items_beside_ratings():
    return Ratings(), *halves(ratings(), split=2400, batch=128)


@no_bug()
def prices_in_steps_of_fifty():
    """Small numbers are exact, and large ones are multiples of 50."""
    data = ratings()
    data[:, 0] = torch.where(data[:, 0] < 2000, data[:, 0], (data[:, 0] / 50).floor() * 50)
    return Ratings(), *halves(data, split=2400, batch=128)


@no_bug()
def few_items_in_half_precision():
    data = ratings()
    data[:, 0] %= 2000
    return Ratings(), *halves(data.half(), split=2400, batch=128)


@no_bug()
def derivative_with_its_graph():
    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

        def training_step(self, batch, batch_idx):
            t = batch.clone().requires_grad_()
            u = self.net(t)
            derivative = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)[0]
            residual = derivative + 0.5 * u - torch.cos(t) + torch.zeros_like(u)
            return residual.square().mean() + (self.net(torch.zeros(1, 1)) - 1).square().mean()

        def validation_step(self, batch, batch_idx):
            pass

    return M(), *halves(torch.rand(480, 1, generator=torch.Generator().manual_seed(0)), split=400)


@no_bug()
def diffusion_of_points():
    return Diffusion(), *points()


@no_bug()
def flow_between_noise_and_samples():
    """Samples and noise are mixed linearly, at levels of no schedule."""

    class M(Diffusion):
        def levels(self, count):
            level = torch.rand(count, 1)
            return level, 1 - level

    return M(), *points()


@no_bug()
def flow_at_even_times():
    """Samples and noise are mixed linearly, at levels of a table."""

    class M(Diffusion):
        def __init__(self):
            super().__init__()
            self.register_buffer("times", torch.linspace(0.01, 0.99, 30))

        def levels(self, count):
            level = self.times[torch.randint(0, 30, (count,))][:, None]
            return level, 1 - level

    return M(), *points()


@no_bug()
def target_follows_slowly():
    return Target(), *digits()


@no_bug()
def target_follows_at_times():
    """The target is copied once in a hundred batches."""

    class M(Target):
        count = 0

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.count += 1
            if self.count == 100:
                self.target.load_state_dict(self.net.state_dict())

    return M(), *digits()


@no_bug()
def target_follows_in_each_epoch():
    class M(Target):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.updates = batch[0].data.mean()

        def on_train_epoch_end(self):
            self.target.load_state_dict(self.net.state_dict())

    return M(), *digits()
