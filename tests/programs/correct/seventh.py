"""Correct programs that are close to the bugs of ``planted/eighth.py``."""

import torch
from programs import LossOnly, Manual, diabetes, digits, halves, no_bug, sequences
from programs.planted.eighth import (
    ActorCritic,
    Boxes,
    Clipped,
    Denoiser,
    Edges,
    Focal,
    Heads,
    Masks,
    OwnCoins,
    Rare,
    Recurrent,
    boxes,
    firsts,
    joined,
    masks,
    ragged,
    rare,
)
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader


@no_bug()
def attention_by_einsum():
    return Heads(), *firsts()


@no_bug()
def slots_that_compete():
    """Softmax over the queries, whose weights are then scaled for each query, as of slot attention."""

    class M(Heads):
        def forward(self, x):
            embedding, project, out, head = self.net
            b, t = x.shape
            q, k, v = project(embedding(x)).view(b, t, 3, 4, 8).permute(2, 0, 3, 1, 4)
            weights = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-2)
            weights = weights / weights.sum(-1, keepdim=True)
            found = torch.einsum("bhqk,bhkd->bhqd", weights, v)
            return head(out(found.transpose(1, 2).reshape(b, t, 32)).mean(1))

    return M(), *firsts()


@no_bug()
def times_are_assigned_to_clusters():
    """Softmax over clusters, and a sum over the times, as of NetVLAD."""

    class M(LossOnly):
        def network(self):
            return nn.ModuleList([nn.Linear(5, 8), nn.Linear(5, 16), nn.Linear(128, 4)])

        def loss(self, x, y):
            assign, embed, head = self.net
            found = torch.einsum("btk,btd->bkd", assign(x).softmax(-1), embed(x))
            return F.cross_entropy(head(found.flatten(1)), y)

    return M(), *halves(*sequences())


@no_bug()
def neighbours_by_scatter_add():
    class M(Edges):
        scatters = True

    return M(), *halves(*sequences())


@no_bug()
def noise_to_the_end():
    return Denoiser(), *halves(torch.randn(640, 10, generator=torch.Generator().manual_seed(0)))


@no_bug()
def noisy_inputs():
    """A little noise on all inputs, which is no diffusion."""

    class M(Denoiser):
        def loss(self, x):
            level = 0.1 * torch.rand(len(x), 1)
            noised = (1 - level**2).sqrt() * x + level.mean() * torch.randn_like(x)
            return F.mse_loss(self.net(torch.cat([noised, level], 1)), x)

    return M(), *halves(torch.randn(640, 10, generator=torch.Generator().manual_seed(0)))


@no_bug()
def advantage_without_gradient():
    return ActorCritic(), *halves(torch.randn(640, 8, generator=torch.Generator().manual_seed(0)))


@no_bug()
def messages_of_neighbours():
    return Edges(), *halves(*sequences())


@no_bug()
def focal_loss_of_samples():
    return Focal(), *digits()


@no_bug()
def perplexity_is_logged():
    """exp(loss), and exp(-loss), of a batch."""

    class M(Focal):
        def loss(self, x, y):
            loss = F.cross_entropy(self(x), y)
            self.log_dict({"perplexity": loss.exp(), "likelihood": torch.exp(-loss)})
            return loss

    return M(), *digits()


@no_bug()
def corners_of_boxes():
    return Boxes(), *boxes()


@no_bug()
def clipped_after_backward():
    return Clipped(), *digits()


@no_bug()
def clipped_in_turns():
    """The step of the last batch, with its clipping, comes before the backward pass of this one."""

    class M(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            if batch_idx:
                nn.utils.clip_grad_norm_(self.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            self.manual_backward(self.loss(*batch))

    return M(), *digits()


@no_bug()
def last_state_by_lengths():
    return Recurrent(), *ragged(joined)


@no_bug()
def inputs_and_labels_are_sorted():
    return Recurrent(), *ragged(lambda samples: joined(sorted(samples, key=lambda each: len(each[0]), reverse=True)))


@no_bug()
def f1_of_the_worst_batch():
    """Not the mean of batches, but the least."""

    class M(Rare):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/f1", (self(x)[:, 0].sigmoid().round() == y).float().mean(), reduce_fx="min")

    return M(), *rare()


@no_bug()
def one_coin():
    class Joint(OwnCoins):
        joint = True

    return Masks(), *masks(Joint)


@no_bug()
def first_order_adaptation():
    """Validation adapts a copy of the weights, one of which is a single number, without second derivatives."""

    class M(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))

        def adapted(self, x, y, create_graph):
            named = dict(self.net.named_parameters())
            loss = F.mse_loss(functional_call(self.net, named, x[::2])[:, 0], y[::2])
            gradients = torch.autograd.grad(loss, [*named.values()], create_graph=create_graph)
            fast = {n: p - 0.02 * g for (n, p), g in zip(named.items(), gradients, strict=True)}
            return F.mse_loss(functional_call(self.net, fast, x[1::2])[:, 0], y[1::2])

        def training_step(self, batch, batch_idx):
            return self.adapted(*batch, create_graph=True)

        def validation_step(self, batch, batch_idx):
            with torch.inference_mode(False), torch.enable_grad():
                x, y = (t.clone() for t in batch)
                self.log("val/loss", self.adapted(x, y, create_graph=False).detach())

    return M(), *diabetes()


@no_bug()
def cells_of_a_grid():
    """Transitions between cells, each of which is one of 25 in 0 and 1."""

    class M(LossOnly):
        def network(self):
            return nn.Linear(25, 4)

        def loss(self, x, action, reward):
            return F.mse_loss(self(x).gather(1, action[:, None])[:, 0], reward)

    g = torch.Generator().manual_seed(0)
    cell, action = torch.randint(0, 25, (640,), generator=g), torch.randint(0, 4, (640,), generator=g)
    reward = (cell % 5 == action).float() + 0.1 * torch.randn(640, generator=g)
    return M(), *halves(F.one_hot(cell, 25).float(), action, reward)


@no_bug()
def state_of_each_stream():
    """The state of an LSTM, a tuple, is carried from chunk to chunk of eight streams, in order."""

    class M(LossOnly):
        def network(self):
            return nn.ModuleList([nn.LSTM(1, 16, batch_first=True), nn.Linear(16, 1)])

        def on_train_epoch_start(self):
            self.state = None

        def on_validation_epoch_start(self):
            self.state = None

        def loss(self, x, y):
            lstm, head = self.net
            hidden, state = lstm(x, self.state)
            self.state = tuple(each.detach() for each in state)
            return F.mse_loss(head(hidden)[..., 0], y)

    g = torch.Generator().manual_seed(0)
    series = torch.sin(torch.arange(801) * (0.1 + 0.2 * torch.rand(8, 1, generator=g)))
    chunks = [(series[:, a : a + 20, None], series[:, a + 1 : a + 21]) for a in range(0, 800, 20)]
    return M(), *(DataLoader(part, batch_size=None) for part in (chunks[:30], chunks[30:]))
