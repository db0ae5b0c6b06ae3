"""Programs that look wrong only if one does not ask what their steps and loaders really do."""

import numpy as np
import torch
from programs import Base, LossOnly, Table, diabetes, digits, halves, loaders, mlp, no_bug, segments, sequences
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate, get_worker_info
from torchmetrics.classification import MulticlassAccuracy


@no_bug()
def unknown_classes_of_validation_are_masked():
    class Net(Base):
        def network(self):
            return mlp(outputs=8)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/loss", F.cross_entropy(self(x)[y >= 0], y[y >= 0]))

    (x, y), (held_x, held_y) = (part.tensors for part in digits(loaded=False))
    order = (held_y >= 8).int().argsort(stable=True)  # the first batch has none
    held_x, held_y = held_x[order], torch.where(held_y < 8, held_y, -1)[order]
    return Net(), *loaders(TensorDataset(x[y < 8], y[y < 8]), TensorDataset(held_x, held_y))


class Pairs(LossOnly):
    def loss(self, x, other, is_same):
        distance = (self(x) - self(other)).abs().mean(1)
        return F.binary_cross_entropy_with_logits(2 - distance, is_same)


def pair(samples):
    x, y = default_collate(samples)
    order = torch.randperm(len(x))
    return x, x[order], (y == y[order]).float()


@no_bug()
def collate_makes_pairs_and_whether_they_are_alike():
    return Pairs(), *(DataLoader(part, 64, shuffle=True, collate_fn=pair) for part in digits(loaded=False))


@no_bug()
def validation_also_scores_classes_that_training_has_not():
    class Net(Base):
        def loss(self, x, y):
            return F.cross_entropy(self(x)[:, :8], y)

    (x, y), held = (part.tensors for part in digits(loaded=False))
    return Net(), *loaders(TensorDataset(x[y < 8], y[y < 8]), TensorDataset(*held))


class Bags(LossOnly):
    by_lengths = True

    def network(self):
        return nn.ModuleList((nn.EmbeddingBag(40, 16), nn.Linear(16, 4)))

    def loss(self, labels, tokens, sizes):
        begins = sizes.cumsum(0) - sizes if self.by_lengths else sizes
        return F.cross_entropy(self.net[1](self.net[0](tokens, begins)), labels)


def texts(by_lengths):
    g = torch.Generator().manual_seed(0)
    labels, lengths = torch.randint(0, 4, (480,), generator=g), torch.randint(5, 20, (480,), generator=g)
    rows = [
        (torch.randint(10 * y, 10 * y + 12, (n,), generator=g) % 40, y)
        for y, n in zip(labels.tolist(), lengths.tolist(), strict=True)
    ]

    def join(samples):
        sizes = torch.tensor([len(t) for t, _ in samples])
        begins = sizes if by_lengths else sizes.cumsum(0) - sizes
        return torch.tensor([y for _, y in samples]), torch.cat([t for t, _ in samples]), begins

    return [DataLoader(part, 32, shuffle=True, collate_fn=join) for part in (rows[:320], rows[320:])]


@no_bug()
def texts_are_joined_with_their_lengths():
    return Bags(), *texts(True)


@no_bug()
def texts_are_joined_with_their_begins():
    class Net(Bags):
        by_lengths = False

    return Net(), *texts(False)


@no_bug()
def soft_labels_of_the_dataset_follow_predictions():
    class Soft(Dataset):
        def __init__(self, x, y):
            self.x, self.y = x, F.one_hot(y, 10).float()

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            return self.x[index], self.y[index], index

    class Net(LossOnly):
        def loss(self, x, y, index):
            return F.cross_entropy(self(x), y)

        def training_step(self, batch, batch_idx):
            soft, index = self.trainer.train_dataloader.dataset.y, batch[2]
            soft[index] = 0.9 * soft[index] + 0.1 * self(batch[0]).detach().softmax(1)
            return self.loss(*batch)

    return Net(), *loaders(*(Soft(*part.tensors) for part in digits(loaded=False)))


@no_bug()
def generator_takes_the_seed_of_its_worker():
    class Noisy(Dataset):
        def __init__(self, part, noise):
            self.part, self.noise, self.rng = part, noise, None

        def __len__(self):
            return len(self.part)

        def __getitem__(self, index):
            if self.rng is None:
                info = get_worker_info()
                self.rng = np.random.default_rng(0 if info is None else info.seed)
            x, y = self.part[index]
            return x + self.noise * torch.tensor(self.rng.standard_normal(x.shape), dtype=x.dtype), y

    train, val = digits(loaded=False)
    return Base(), DataLoader(Noisy(train, 0.1), 32, shuffle=True, num_workers=2), DataLoader(Noisy(val, 0.0), 32)


@no_bug()
def held_out_items_of_the_same_users():
    class Net(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(60, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 60))

        def loss(self, x, held=None):
            return -(self(x).log_softmax(1) * (x if held is None else held)).sum(1).mean()

    g = torch.Generator().manual_seed(0)
    scores = torch.randn(320, 4, generator=g) @ torch.randn(4, 60, generator=g)
    likes = (scores > scores.quantile(0.8, dim=1, keepdim=True)).float()
    held = likes * (torch.rand(320, 60, generator=g) < 0.2)
    return Net(), *loaders(TensorDataset(likes - held), TensorDataset(likes - held, held))


@no_bug()
def all_points_of_a_field_are_fitted_and_measured():
    class Net(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 1))

        def loss(self, x, y):
            return F.mse_loss(self(x)[:, 0], y)

    axes = [torch.linspace(-1, 1, 6)] * 3 + [torch.linspace(-1, 1, 4)]
    x = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 4)
    data = TensorDataset(x, torch.exp(-x.square().sum(1)))
    return Net(), *loaders(data, data)


@no_bug()
def mirrored_pictures_are_averaged_in_validation():
    class Net(Base):
        def network(self):
            return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))

        def validation_step(self, batch, batch_idx):
            x, y = batch
            found = (self(x) + self(x.flip(-1)).flip(-1)).argmax(1)
            self.log("val/iou", ((found > 0) & (y > 0)).sum() / ((found > 0) | (y > 0)).sum())

    return Net(), *halves(*segments(), split=240)


@no_bug()
def members_of_an_ensemble_vote():
    class Net(Base):
        def network(self):
            return nn.ModuleList(mlp() for _ in range(5))

        def loss(self, x, y):
            return sum(F.cross_entropy(net(x), y) for net in self.net)

        def validation_step(self, batch, batch_idx):
            votes = torch.stack([net(batch[0]).argmax(1) for net in self.net])
            self.log("val/acc", (votes.mode(0).values == batch[1]).float().mean())

    return Net(), *digits()


@no_bug()
def random_segments_are_encoded_and_decoded():
    class Net(LossOnly):
        def network(self):
            return nn.Sequential(nn.Conv1d(1, 8, 4, 2, 1), nn.ELU(), nn.ConvTranspose1d(8, 1, 4, 2, 1))

        def loss(self, x):
            return F.mse_loss(self(x), x)

        def training_step(self, batch, batch_idx):
            start = int(torch.randint(0, 96, (1,)))
            return self.loss(batch[..., start : start + 32])

    t = torch.arange(128) / 128
    rates = torch.rand(480, 1, 1, generator=torch.Generator().manual_seed(0)) * 20 + 2
    return Net(), *halves(torch.sin(6.28 * rates * t), split=320)


@no_bug()
def slow_path_gets_each_fourth_frame():
    class Clips(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x[::4], x, y

    class Net(LossOnly):
        def network(self):
            return nn.ModuleList((nn.Linear(20, 16), nn.Linear(20, 8), nn.Linear(24, 4)))

        def loss(self, slow, fast, y):
            slow, fast = (net(x).relu().mean(1) for net, x in zip(self.net, (slow, fast), strict=False))
            return F.cross_entropy(self.net[2](torch.cat([slow, fast], 1)), y)

    x, y = sequences(length=24, features=20)
    return Net(), *loaders(Clips(x[:480], y[:480]), Clips(x[480:], y[480:]))


@no_bug()
def residual_of_an_equation_is_the_only_loss():
    class Net(LossOnly):
        def network(self):
            return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, x, t):
            return torch.sin(3.14 * x) + t * x * (1 - x) * self.net(torch.cat([x, t], 1))

        def training_step(self, batch, batch_idx):
            x, t = (part.clone().requires_grad_() for part in batch.split(1, 1))
            by_t, by_x = torch.autograd.grad(self(x, t).sum(), (t, x), create_graph=True)
            (twice,) = torch.autograd.grad(by_x.sum(), x, create_graph=True)
            return F.mse_loss(by_t, 0.1 * twice)

        def validation_step(self, batch, batch_idx):
            self.log("val/mean", self(*batch.split(1, 1)).mean())

    return Net(), *halves(torch.rand(480, 2, generator=torch.Generator().manual_seed(0)), split=320)


class Pharmacy(LossOnly):
    """Predicts how a drug binds to its target, which is a protein."""

    def __init__(self):
        super().__init__()
        self.drug_encoder, self.target_encoder = nn.Linear(4, 16), nn.Linear(6, 16)

    def loss(self, x, y):
        drug, target = self.drug_encoder(x[:, :4]), self.target_encoder(x[:, 4:])
        return F.mse_loss((drug * target).mean(1), y)


@no_bug()
def target_of_a_drug_is_encoded():
    return Pharmacy(), *diabetes()


@no_bug()
def teacher_with_more_inputs_has_its_own_loss():
    class Net(LossOnly):
        def __init__(self):
            super().__init__()
            self.teacher = mlp()

        def loss(self, x, y):
            soft, out = self.teacher(x), self(x * (torch.arange(8) < 5))
            distance = F.kl_div(out.log_softmax(1), soft.detach().softmax(1), reduction="batchmean")
            return F.cross_entropy(soft, y) + F.cross_entropy(out, y) + distance

    return Net(), *digits()


@no_bug()
def learns_from_each_fourth_step_of_its_environment():
    class Net(LossOnly):
        frames, every = 0, 4

        def training_step(self, batch, batch_idx):
            self.frames += 1
            if self.frames % self.every:
                return None
            return self.loss(*batch)

    return Net(), *digits()


@no_bug()
def one_metric_is_reset_before_each_validation():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.accuracy = MulticlassAccuracy(10)

        def training_step(self, batch, batch_idx):
            out = self(batch[0])
            self.log("train/acc", self.accuracy(out, batch[1]))
            return F.cross_entropy(out, batch[1])

        def on_validation_epoch_start(self):
            self.accuracy.reset()

        def validation_step(self, batch, batch_idx):
            self.accuracy.update(self(batch[0]), batch[1])

        def on_validation_epoch_end(self):
            self.log("val/acc", self.accuracy.compute())
            self.accuracy.reset()

    return Net(), *digits()


@no_bug()
def load_of_the_last_batch_is_kept():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(64, 3), nn.ModuleList(nn.Linear(64, 32) for _ in range(3))
            self.register_buffer("load", torch.zeros(3))

        def forward(self, x):
            weights = self.gate(x).softmax(1)
            self.load.copy_(weights.detach().mean(0))
            return sum(weights[:, [i]] * expert(x) for i, expert in enumerate(self.experts))

    class Net(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), Gated(), nn.ReLU(), nn.Linear(32, 10))

    return Net(), *digits()


@no_bug()
def area_under_the_curve_of_each_user_is_averaged():
    class Net(LossOnly):
        def network(self):
            return nn.Linear(10, 1)

        def loss(self, x, y):
            return F.binary_cross_entropy_with_logits(self(x)[:, 0], y)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            scores = self(x)[:, 0]
            pairs = (scores[y == 1][:, None] > scores[y == 0]).float()
            self.log("val/auc", pairs.mean())

    train, val = (TensorDataset(x, (y > 0).float()) for x, y in (d.tensors for d in diabetes(loaded=False)))
    shown = [[*range(i, i + 24)] for i in range(0, 120, 24)]
    return Net(), DataLoader(train, 32, shuffle=True), DataLoader(val, batch_sampler=shown)


@no_bug()
def subjects_are_topics():
    class Texts(TensorDataset):
        subjects = ()

    (x, y), held = (part.tensors for part in diabetes(loaded=False))
    data = Texts(torch.cat([x, held[0]]), torch.cat([y, held[1]]))
    names = ("algebra", "anatomy", "biology", "chemistry", "ethics", "geometry", "history", "law", "logic", "physics")
    data.subjects = [names[i % 10] for i in range(len(data))]
    parts = [Subset(data, [*rows]) for rows in (range(0, 400, 3), range(1, 400, 3))]
    return Table(), *loaders(*parts)


@no_bug()
def next_state_is_almost_the_present_one():
    class Net(Table):
        def loss(self, x, y):
            return F.mse_loss(x[:, 0] + 0.1 * self(x)[:, 0], y)

    x, _ = diabetes(loaded=False)[0].tensors
    y = x[:, 0] + 1e-3 * torch.sin(3 * x[:, 1])
    return Net(), *halves(x, y, split=240)
