"""The programs of ``planted/thirtieth.py`` without their bugs, and what looks like them."""

import copy

import lightning as L
import torch
from programs import Base, LossOnly, Table, diabetes, digits, halves, no_bug, segments, tokens
from programs.planted import thirtieth as planted
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler


@no_bug()
def messages_follow_the_edges():
    return planted.Tree(), *planted.rivers()


@no_bug()
def messages_go_both_ways():
    class Net(planted.Tree):
        def __init__(self):
            super().__init__()
            self.edges = torch.cat([self.edges, self.edges.flip(0)], 1)

        def received(self, h):
            source, target = self.edges
            return torch.zeros_like(h).index_add_(1, source, h[:, target])

    return Net(), *planted.rivers()


@no_bug()
def derivatives_have_the_order_of_the_coordinates():
    return planted.Heat(), *planted.places()


@no_bug()
def value_behind_four_steps_is_discounted_four_times():
    return planted.Value(), *planted.visits()


@no_bug()
def masks_are_flipped_as_pictures():
    return planted.Turned(), *halves(*segments(), split=240)


@no_bug()
def two_views_are_flipped_apart():
    class Net(Base):
        def training_step(self, batch, batch_idx):
            x, y = batch
            if torch.rand(()) < 0.5:
                first, second = x.flip(-1), x.flip(-2)
            else:
                first, second = x, x
            return F.cross_entropy(self(x), y) + 0.01 * F.mse_loss(self(first), self(second))

    return Net(), *digits()


@no_bug()
def scores_are_divided_by_a_root():
    return planted.Attentive(), *planted.sentences()


@no_bug()
def scores_of_unit_vectors_have_a_scale():
    class Net(planted.Attentive):
        def attend(self, q, k, v, padding):
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            return (10 * q @ k.mT).masked_fill(padding[:, None], -1e9).softmax(-1) @ v

    return Net(), *planted.sentences()


@no_bug()
def attention_of_torch_gets_a_mask_of_words():
    class Net(planted.Attentive):
        def attend(self, q, k, v, padding):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=~padding[:, None])

    return Net(), *planted.sentences()


@no_bug()
def padded_words_pass_a_convolution():
    class Net(planted.Attentive):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv1d(64, 64, 3, padding=1)

        def forward(self, x, lengths):
            padding = torch.arange(x.shape[1]) >= lengths[:, None]
            h = self.first(self.embed(x).mT).mT.relu()
            h = h + self.attend(*self.mix(self.norm(h)).chunk(3, -1), padding)
            return self.net(h.masked_fill(padding[..., None], 0).sum(1) / lengths[:, None])

        def training_step(self, batch, batch_idx):
            x, lengths, y = batch
            return F.cross_entropy(self(x, lengths), y)

        def validation_step(self, batch, batch_idx):
            x, lengths, y = batch
            self.log("val/acc", (self(x, lengths).argmax(1) == y).float().mean())

    train, val = planted.sentences()
    x, y = (torch.cat(parts) for parts in zip(train.dataset.tensors, val.dataset.tensors, strict=True))
    return Net(), *halves(x, (x > 0).sum(1), y, split=480)


@no_bug()
def peak_of_signed_pictures_is_two():
    return planted.Denoised(), *planted.noisy()


@no_bug()
def last_states_of_both_directions_are_read():
    return planted.TwoWays(), *planted.first_tokens()


@no_bug(accumulate_grad_batches=4)
def loss_of_counts_is_left_to_lightning():
    return planted.Counts(), *planted.events()


@no_bug(accumulate_grad_batches=4)
def loss_of_an_accumulated_step_is_logged():
    class Net(planted.Counts):
        def training_step(self, batch, batch_idx):
            loss = self.loss(*batch)
            self.log("train/nll_per_batch", loss.detach() / self.trainer.num_training_batches)
            return loss

    return Net(), *planted.events()


@no_bug()
def each_part_has_its_dataset():
    return Base(), planted.Halves(), None


@no_bug()
def labels_are_shifted_by_the_library():
    return planted.Song(), *halves(tokens(), tokens(), split=480)


@no_bug()
def hours_have_an_index_of_their_own():
    return planted.Slots(), *planted.week()


@no_bug()
def densities_of_components_are_added_up():
    return planted.Mixed(), *diabetes()


@no_bug(max_epochs=3)
def schedule_counts_steps():
    return planted.Warmed(60), *digits()


@no_bug()
def splits_log_names_of_their_own():
    return planted.Both(), *digits()


@no_bug()
def training_logs_steps_by_the_name_of_validation():
    class Net(Base):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("val/loss", loss)
            return loss

    return Net(), *digits()


@no_bug()
def temperature_falls_to_its_end():
    return planted.Selected(), *diabetes()


@no_bug()
def temperature_falls_and_rises_again():
    class Net(planted.Selected):
        def tau(self):
            share = self.global_step / self.trainer.estimated_stepping_batches
            return self.end + (self.start - self.end) * abs(1 - 2 * share)

    return Net(), *diabetes()


@no_bug()
def density_of_the_base_is_a_sum():
    return planted.Flow(), *planted.shapes()


@no_bug()
def encoder_begins_anew_without_a_state():
    return planted.Tuned(), *digits()


@no_bug()
def keys_of_a_given_state_fit():
    state = {name.removeprefix("encoder."): value for name, value in planted.trained().items()}
    return planted.Tuned(state), *digits()


@no_bug(callbacks=lambda: [planted.Look()])
def callback_restores_the_mode():
    return planted.Dropped(), *digits()


@no_bug(callbacks=lambda: [planted.Ramp()])
def callback_raises_the_weight_of_the_criterion():
    return planted.Held(), *diabetes()


@no_bug(callbacks=lambda: [planted.VainRamp()])
def callback_raises_a_weight_that_a_step_reads():
    class Net(planted.Held):
        def loss(self, x, y):
            self.criterion.amount = self.amount
            return super().loss(x, y)

    return Net(), *diabetes()


@no_bug()
def error_is_that_of_its_unit():
    return planted.Scaled(), *diabetes()


@no_bug(callbacks=lambda: [planted.Average()])
def average_moves_with_each_step():
    return Base(), *digits()


class EpochAverage(planted.Average):
    decay = 0.5

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pass

    def on_validation_start(self, trainer, pl_module):
        self.update(pl_module)
        super().on_validation_start(trainer, pl_module)


@no_bug(callbacks=lambda: [EpochAverage()])
def average_of_epochs_moves_by_half():
    return Base(), *digits()


@no_bug()
def part_of_validation_is_drawn():
    train, val = digits(loaded=False)
    few = RandomSampler(val, replacement=True, num_samples=64)
    return Base(), DataLoader(train, 32, shuffle=True), DataLoader(val, 32, sampler=few)


@no_bug()
def labels_are_mixed_as_their_samples():
    class Net(Base):
        def training_step(self, batch, batch_idx):
            x, y = batch
            share, order = torch.distributions.Beta(0.2, 0.2).sample(), torch.randperm(len(x))
            out = self(share * x + (1 - share) * x[order])
            return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])

    return Net(), *digits()


class Pairs(LossOnly):
    """Brings two views of a digit together, by a part that compares all of a batch."""

    class Compare(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))

        def forward(self, a, b):
            return 10 * F.normalize(self.net(a), dim=-1) @ F.normalize(self.net(b), dim=-1).T

    def network(self):
        return self.Compare()

    def loss(self, x, y):
        scores = self.net(x, x.roll(1, -1))
        return F.cross_entropy(scores, torch.arange(len(x)))


@no_bug()
def a_part_returns_similarities_of_all_pairs():
    return Pairs(), *digits(batch=16)


class Masked(L.LightningModule):
    """Predicts masked tokens, by a loss that is a layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(13, 32), nn.Parameter(0.1 * torch.randn(16, 32))
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.body, self.net = nn.TransformerEncoder(layer, 1), nn.Linear(32, 12)
        self.criterion = nn.CrossEntropyLoss()

    def step(self, batch):
        (x,) = batch
        is_masked = torch.rand(x.shape) < 0.15
        out = self.net(self.body(self.embed(x.masked_fill(is_masked, 12)) + self.places))
        return self.criterion(out.flatten(0, 1), x.masked_fill(~is_masked, -100).flatten())

    def training_step(self, batch, batch_idx):
        return self.step(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.step(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@no_bug()
def masked_tokens_are_targets_of_a_layer():
    x = tokens()
    return Masked(), *(DataLoader([(row,) for row in part], 32) for part in (x[:480], x[480:]))


@no_bug()
def frozen_copy_is_no_average():
    class Net(Table):
        def __init__(self):
            super().__init__()
            self.first = copy.deepcopy(self.net).requires_grad_(False)

        def loss(self, x, y):
            out = self(x)[:, 0]
            return F.mse_loss(out, y) + 0.1 * F.mse_loss(out, self.first(x)[:, 0])

    return Net(), *diabetes()
