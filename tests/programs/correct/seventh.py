"""Correct programs that are close to the bugs of ``planted/eighth.py``."""

import torch
from programs import Manual, digits, halves, no_bug, sequences
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
from torch.nn import functional as F


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
    """exp(loss), and exp(-loss) without a gradient, of a batch."""

    class M(Focal):
        def loss(self, x, y):
            loss = F.cross_entropy(self(x), y)
            self.log_dict({"perplexity": loss.exp(), "likelihood": torch.exp(-loss.detach())})
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
