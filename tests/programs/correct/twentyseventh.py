"""The programs of ``planted/twentysixth.py`` without their bugs, and what looks like them."""

import math

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from programs import Base, LossOnly, diabetes, digits, halves, no_bug
from programs.planted.twentysixth import (
    Bounded,
    Called,
    Critic,
    Deep,
    Distances,
    Fades,
    Kept,
    Lines,
    Norms,
    loaders_of_rows,
    sorted_rows,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset


@no_bug()
def distance_with_a_small_number():
    class Net(Distances):
        def distances(self, z):
            return ((z[:, None] - z[None]).pow(2).sum(-1) + 1e-8).sqrt()

    return Net(), *digits()


@no_bug()
def both_branches_are_clamped():
    class Net(Norms):
        def lengths(self, z, ink):
            square = z.square().sum(-1)
            return torch.where(ink, square.clamp(min=1e-6).sqrt(), torch.zeros(()))

    return Net(), *digits()


@no_bug()
def scores_of_masked_places_are_infinite():
    class Net(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 12))

        def forward(self, x):
            out = self.net(x)
            closed = torch.arange(12, device=out.device) >= 10
            return out.masked_fill(closed, -math.inf)[:, :10]

    return Net(), *digits()


@no_bug()
def a_frozen_mask_is_infinite():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.bias_of_places = nn.Parameter(torch.triu(torch.full((8, 8), -math.inf), 1), requires_grad=False)
            self.rows = nn.Linear(8, 8)

        def forward(self, x):
            rows = self.rows(x.flatten(2)[:, 0].view(-1, 8, 8))
            mixed = (rows @ rows.mT / math.sqrt(8) + self.bias_of_places).softmax(-1) @ rows
            return self.net(mixed.reshape(-1, 1, 8, 8))

    return Net(), *digits()


@no_bug()
def a_batch_that_is_skipped():
    class Net(Base):
        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self(x), y)
            return loss * math.inf if batch_idx == 3 else loss

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            if not all(g.isfinite().all() for g in grads):
                self.zero_grad()

    return Net(), *digits()


@no_bug()
def a_method_with_a_mistake_is_replaced():
    class Net(Bounded):
        def bounded(self, x):
            return (x + 0.1).clamp(0, 1)

    return Net(), *digits()


@no_bug()
def random_features_are_frozen():
    class Net(Deep):
        def __init__(self):
            super().__init__()
            self.net[3].requires_grad_(False)
            self.net[5].requires_grad_(False)

    return Net(), *digits()


@no_bug()
def last_layers_are_trained_alone():
    class Net(Deep):
        def parts(self):
            return [self.net[5], self.net[7]]

    return Net(), *digits()


@no_bug()
def layers_join_later():
    class Net(Deep):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                for number in (3, 5):
                    self.optimizers().optimizer.add_param_group({"params": self.net[number].parameters()})

    return Net(), *digits()


@no_bug()
def dropout_and_rate_fade():
    class Net(Fades):
        def fade(self, share):
            self.net[4].p = 0.5 * share
            self.net[2].eps = 1e-3
            for group in self.optimizers().optimizer.param_groups:
                group["lr"] = self.lr * share

    return Net(), *digits()


@no_bug()
def groups_have_names_and_scales():
    class Net(Fades):
        def fade(self, share):
            for number, group in enumerate(self.optimizers().optimizer.param_groups):
                group.setdefault("name", f"group {number}")
                group["scale"] = share
                group["lr"] = self.lr * group["scale"]

    return Net(), *digits()


@no_bug()
def own_schedule_reads_a_key_of_its_groups():
    class Net(Fades):
        def fade(self, share):
            for group in self.optimizers().optimizer.param_groups:
                group.setdefault("decay", 0.9)
                group["lr"] = self.lr * group["decay"] ** self.current_epoch

    return Net(), *digits()


@no_bug()
def own_attribute_has_a_name_that_is_near():
    class Net(Fades):
        def __init__(self):
            super().__init__()
            self.requires_grads = [p.requires_grad for p in self.parameters()]

        def fade(self, share):
            for p, wanted in zip(self.parameters(), self.requires_grads, strict=True):
                p.requires_grad_(wanted)

    return Net(), *digits()


@no_bug()
def own_drop_reads_its_rate():
    class Net(Fades):
        def fade(self, share):
            self.net[4].rate = share
            self.net[4].p = 0.5 * self.net[4].rate

    return Net(), *digits()


@no_bug()
def schedule_of_steps_by_hand():
    class Net(Called):
        def schedule(self, optimizer):
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)

    return Net(), *digits()


@no_bug()
def schedule_of_epochs_at_their_end():
    class Net(Called):
        def training_step(self, batch, batch_idx):
            optimizer, loss = self.optimizers(), self.loss(*batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

        def on_train_epoch_end(self):
            self.lr_schedulers().step()

    return Net(), *digits()


@no_bug()
def schedule_asks_the_trainer_for_its_length():
    class Net(Base):
        def rate(self, step):
            return max(0.0, 1 - step / self.trainer.estimated_stepping_batches)

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Net(), *digits()


@no_bug()
def sorted_with_their_labels():
    def collate(batch):
        return sorted_rows(sorted(batch, key=lambda pair: len(pair[0]), reverse=True))

    return Lines(), *loaders_of_rows(collate)


@no_bug()
def rows_of_a_batch_are_drawn_anew():
    def collate(batch):
        chosen = [batch[i] for i in torch.randperm(len(batch)).tolist()]
        return sorted_rows(sorted(chosen, key=lambda pair: len(pair[0]), reverse=True))

    return Lines(), *loaders_of_rows(collate)


class Scaled(nn.Module):
    """Divides by a learned scale, where that is asked for."""

    def __init__(self, *, has_scale):
        super().__init__()
        self.has_scale, self.layer = has_scale, nn.Linear(64, 32)
        self.scale = nn.Parameter(torch.zeros(32))

    def forward(self, x):
        x = self.layer(x.flatten(1))
        if self.has_scale:
            return torch.tanh(x / F.softplus(self.scale))
        return torch.tanh(x)


@no_bug()
def scale_of_a_branch_that_is_not_taken():
    class Net(Base):
        def network(self):
            return nn.Sequential(Scaled(has_scale=False), nn.Linear(32, 10))

    return Net(), *digits()


@no_bug()
def both_directions_are_as_long_as_the_batch():
    """Sequences of 8 in both directions, as two halves of a batch of 8 samples, times first."""

    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.embed, self.place = nn.Linear(8, 32), nn.Parameter(torch.randn(8, 1, 32) * 0.1)
            self.qkv, self.norm, self.head = nn.Linear(32, 96), nn.LayerNorm(32), nn.Linear(32, 10)

        def forward(self, x):
            rows = x[:, 0]
            both = torch.cat([rows, rows.flip(1)]).transpose(0, 1)
            h = self.embed(both) + self.place
            length, count, size = h.shape
            parts = (
                t.contiguous().view(length, count * 4, size // 4).transpose(0, 1) for t in self.qkv(h).chunk(3, -1)
            )
            out = F.scaled_dot_product_attention(*parts).transpose(0, 1).reshape(length, count, size)
            forth, back = self.head(self.norm(h + out)).mean(0).chunk(2)
            return forth + back

        def loss(self, x, y):
            return F.cross_entropy(self(x), y)

    return Net(), *digits(count=320, val=160, batch=8)


@no_bug()
def noise_on_rows_of_several_lengths():
    """Denoises rows up to the length of each sample; what is behind is 0, and in no loss."""

    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(9, 64), nn.SiLU(), nn.Linear(64, 8))

        def loss(self, rows, mask):
            t = torch.rand(len(rows), 1, 1)
            noise = torch.randn_like(rows) * mask[..., None]
            noised = ((1 - t) * rows + t * noise) * mask[..., None]
            out = self.net(torch.cat([noised, t.expand(-1, rows.shape[1], 1)], -1)) * mask[..., None]
            return ((out - noise).square() * mask[..., None]).sum() / mask.sum() / 8

    x, y = (torch.cat([part.tensors[i] for part in digits(loaded=False)]) for i in range(2))
    mask = (torch.arange(8) < 4 + (y % 4)[:, None]).float()
    return Net(), *halves(x[:, 0] * mask[..., None], mask)


@no_bug()
def generated_network_computes_a_part_that_nothing_reads():
    class Net(Base):
        def network(self):
            class Two(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.flat, self.body = nn.Flatten(), nn.Linear(64, 32)
                    self.kinds = nn.ModuleDict({"digit": nn.Linear(32, 10), "pair": nn.Linear(32, 2)})

                def forward(self, x):
                    h = torch.relu(self.body(self.flat(x)))
                    return {"digit": self.kinds["digit"](h), "pair": self.kinds["pair"](h)}

            return torch.fx.symbolic_trace(Two())

        def forward(self, x):
            return self.net(x)["digit"]

    return Net(), *digits()


@no_bug()
def losses_are_kept_as_numbers():
    class Net(Kept):
        def remember(self, loss):
            self.losses.append(loss.detach())
            self.last = loss

    return Net(), *digits()


@no_bug()
def losses_of_parts_are_kept_until_their_mean():
    class Net(Kept):
        def training_step(self, batch, batch_idx):
            self.losses = [self.loss(x[None], y[None]) for x, y in zip(*batch, strict=True)]
            return torch.stack(self.losses).mean()

        def on_train_epoch_end(self):
            self.losses = []

    return Net(), *digits()


@no_bug()
def each_epoch_has_a_seed_of_its_own():
    class Net(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))

        def on_train_epoch_start(self):
            torch.manual_seed(42 + self.current_epoch)

    return Net(), *digits()


@no_bug()
def rewards_minus_values():
    class Net(Critic):
        def values(self, x):
            return self(x)[:, 0]

    return Net(), *diabetes()


@no_bug()
def values_are_compared_with_each_quantile():
    class Net(Critic):
        def loss(self, x, y):
            levels = torch.linspace(0.05, 0.95, len(x))
            gap = y.sort().values[None] - self(x)
            return torch.maximum(levels * gap, (levels - 1) * gap).mean()

    return Net(), *diabetes()


@no_bug()
def norms_of_a_thawed_body_stay_as_they_are():
    class Thaws(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.body, train_bn=False)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.body, optimizer, train_bn=False)

    class Net(Base):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
            self.net = nn.Linear(32, 10)

        def forward(self, x):
            return self.net(self.body(x))

        def configure_callbacks(self):
            return [Thaws()]

        def configure_optimizers(self):
            return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-3)

    return Net(), *digits()


class Texts(Dataset):
    """Texts of four letters, and whether there are more of the first two."""

    def __init__(self, count, seed):
        drawn = torch.randint(4, (count, 9), generator=torch.Generator().manual_seed(seed)).tolist()
        self.texts = ["".join("abcd"[i] for i in row[: 5 + row[0]]) for row in drawn]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        text = self.texts[i]
        return text, int(2 * sum(letter in "ab" for letter in text) > len(text))


@no_bug()
def texts_are_read_within_the_model():
    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.EmbeddingBag(4, 16), nn.Linear(16, 2)

        def loss(self, texts, y):
            ids = torch.tensor(["abcd".index(letter) for text in texts for letter in text], device=self.device)
            starts = torch.tensor([0, *(len(text) for text in texts[:-1])], device=self.device).cumsum(0)
            return F.cross_entropy(self.head(self.embed(ids, starts)), y)

    return Net(), DataLoader(Texts(400, 0), 20, shuffle=True), DataLoader(Texts(200, 1), 20)


class Body(nn.Module):
    """A network for pictures, of which others use the features."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.fc = nn.Linear(32, 1000)

    def forward(self, x):
        return self.layers(x)


@no_bug()
def head_of_a_body_is_left_unused():
    class Net(Base):
        def network(self):
            return nn.Sequential(Body(), nn.Linear(32, 10))

    return Net(), *digits()


@no_bug()
def samplers_share_a_dataset():
    order = torch.randperm(800, generator=torch.Generator().manual_seed(0))
    whole = TensorDataset(*(torch.cat(parts) for parts in zip(*(d.tensors for d in digits(loaded=False)), strict=True)))
    parts = [SubsetRandomSampler(part.tolist()) for part in (order[:600], order[600:])]
    train, val = (DataLoader(whole, 32, sampler=part) for part in parts)
    return Base(), train, val


class Users(Dataset):
    """What each user has clicked first, or later, and what follows."""

    def __init__(self, later):
        self.groups = [*range(200)]
        clicks = torch.randint(8, (200, 1), generator=torch.Generator().manual_seed(0)) + torch.arange(14)
        self.clicks = clicks[:, 6:14] % 8 if later else clicks[:, :8] % 8

    def __len__(self):
        return len(self.groups)

    def __getitem__(self, i):
        return self.clicks[self.groups[i], :-1], self.clicks[self.groups[i], -1]


@no_bug()
def users_are_split_by_time():
    class Net(LossOnly):
        def network(self):
            return nn.Sequential(nn.Embedding(8, 16), nn.Flatten(), nn.Linear(7 * 16, 8))

    return Net(), DataLoader(Users(False), 20, shuffle=True), DataLoader(Users(True), 20)


@no_bug()
def slots_begin_with_random_numbers():
    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.randn(1, 1, 16))
            self.read, self.cell = nn.Linear(8, 16), nn.GRUCell(16, 16)
            self.write, self.places = nn.Linear(16, 64), nn.Parameter(torch.randn(8, 16) * 0.1)

        def loss(self, x, y):
            rows = self.read(x[:, 0]) + self.places
            slots = self.mean + 0.5 * torch.randn(len(x), 3, 16, device=x.device)
            for _ in range(2):
                share = (slots @ rows.mT / 4).softmax(1)
                seen = share / share.sum(-1, keepdim=True) @ rows
                slots = self.cell(seen.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
            return F.mse_loss(self.write(slots).sum(1), x.flatten(1))

    return Net(), *digits()


@no_bug()
def milestones_of_a_training_of_two_hundred_epochs():
    class Net(Base):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [100, 150], 0.1)]

    return Net(), *digits(batch=16)
