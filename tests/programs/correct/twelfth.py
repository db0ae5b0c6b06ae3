"""Correct programs that are close to the bugs of ``planted/twelfth.py``."""

import torch
from programs import Base, digits, halves, loaders, mlp, no_bug
from programs.planted.twelfth import (
    Boxes,
    Cached,
    Codes,
    Denoised,
    Pixels,
    Pretrained,
    Ratings,
    Reader,
    Rows,
    Sales,
    Scans,
    Scenes,
    Sets,
    Similar,
    Survival,
    Trusted,
    counted,
    filled,
    noisy,
    numbered,
    patients,
    ratings,
    rectangles,
    reviews,
    scans,
    sets,
    shops,
    shuffled_rows,
    trusted,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset


@no_bug()
def state_without_a_prefix_is_loaded():
    class M(Pretrained):
        prefix = ""

    return M(), *digits()


@no_bug()
def head_is_initialized_after_loading():
    def init(part):
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)

    class M(Base):
        def __init__(self):
            super().__init__()
            self.apply(init)
            self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
            self.encoder.load_state_dict({"1.weight": torch.randn(32, 64) / 4, "1.bias": torch.zeros(32)})
            self.net = nn.Linear(32, 10)
            self.net.apply(init)

        def forward(self, x):
            return self.net(self.encoder(x))

    return M(), *digits()


@no_bug()
def loss_with_weights_before_initialization():
    def init(part):
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)

    class Weighted(nn.Module):
        def __init__(self, weights):
            super().__init__()
            self.weights = nn.Parameter(torch.tensor(weights), requires_grad=False)

        def forward(self, x, y):
            return F.cross_entropy(x, y, weight=self.weights)

    class M(Base):
        def __init__(self):
            super().__init__()
            self.criterion = Weighted(weights=[1.0] * 10)
            self.apply(init)

        def loss(self, x, y):
            return self.criterion(self(x), y)

    return M(), *digits()


@no_bug()
def copy_is_loaded_of_a_new_network():
    class M(Base):
        def __init__(self):
            super().__init__()
            self.slow = mlp()
            self.slow.load_state_dict(self.net.state_dict())
            self.slow.requires_grad_(False)

        def on_train_batch_end(self, *args):
            with torch.no_grad():
                for a, b in zip(self.slow.parameters(), self.net.parameters(), strict=True):
                    a.lerp_(b, 0.1)

    return M(), *digits()


@no_bug()
def random_features_are_meant():
    class M(Base):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU()).requires_grad_(False)
            self.net = nn.Linear(128, 10)

        def forward(self, x):
            return self.net(self.features(x))

    return M(), *digits()


@no_bug()
def patients_are_split():
    return Scans(), *halves(*scans())


@no_bug()
def shops_are_encoded_by_earlier_sales():
    return Sales(), *halves(*shops(honest=True), split=360)


@no_bug()
def each_person_is_a_class():
    x, _ = scans()
    y = torch.arange(60).repeat_interleave(10)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))

    class M(Scans):
        def network(self):
            return mlp(40, 64, 60)

    return M(), *halves(x[order], y[order])


@no_bug()
def a_few_kinds_far_apart():
    return Rows(), *halves(*shuffled_rows(alike=True))


@no_bug()
def users_are_numbered_once():
    user, item, y = ratings()
    user = numbered(user)
    return Ratings(), *loaders(*(TensorDataset(user[r], item[r], y[r]) for r in (slice(600), slice(600, None))))


@no_bug()
def last_ratings_of_each_user_in_order():
    user, item, y = ratings()
    order = user.argsort(stable=True)
    user, item, y = user[order], item[order], y[order]
    last = torch.cat([user[1:] != user[:-1], torch.tensor([True])])
    last |= torch.cat([last[1:], torch.tensor([False])])
    return Ratings(), *loaders(*(TensorDataset(user[r], item[r], y[r]) for r in (~last, last)))


@no_bug()
def hours_of_the_day():
    class M(Ratings):
        def __init__(self):
            super().__init__()
            self.users = nn.Embedding(24, 8)

    _, item, y = ratings()
    hour = torch.arange(len(y)) % 24
    return M(), *halves(hour, item, y, split=600)


@no_bug()
def area_of_corners():
    class M(Boxes):
        corners = True

    return M(), *halves(*rectangles())


@no_bug()
def mask_with_an_own_token():
    class M(Sets):
        inverted = False

        def __init__(self):
            super().__init__()
            self.places = nn.Embedding(20, 32)

        def loss(self, x, y):
            hidden = self.embed(x) + self.places(torch.arange(x.shape[1]))
            hidden = torch.cat([self.own.expand(len(x), -1, -1), hidden], 1)
            mask = F.pad(x == 0, (1, 0))
            return F.mse_loss(self.net(self.body(hidden, src_key_padding_mask=mask)[:, 0])[:, 0], y)

    rows = sets()
    return (
        M(),
        DataLoader(rows[:480], 32, shuffle=True, collate_fn=filled),
        DataLoader(rows[480:], 32, collate_fn=filled),
    )


@no_bug()
def sets_have_no_order():
    class M(Sets):
        inverted = False

    rows = sets()
    return (
        M(),
        DataLoader(rows[:480], 32, shuffle=True, collate_fn=filled),
        DataLoader(rows[480:], 32, collate_fn=filled),
    )


@no_bug()
def last_state_before_the_padding():
    class M(Reader):
        at_end = True

    return M(), *reviews()


@no_bug()
def mean_of_what_is_no_padding_by_its_number():
    class M(Reader):
        def predict(self, x, lengths):
            mask = (x != 0)[..., None]
            hidden = torch.tanh(self.body(self.embed(x))[0] if self.at_end else self.embed(x))
            return self.net(F.pad((hidden * mask).sum(1) / mask.sum(1), (0, 16)))

    return M(), *reviews()


@no_bug(max_epochs=12)
def newton_converges():
    class M(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

        def loss(self, x, y):
            return F.cross_entropy(self(x), y) + 0.01 * self.net[1].weight.square().sum()

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=20, line_search_fn="strong_wolfe")

    return M(), *digits(batch=640)


@no_bug()
def series_with_time_first():
    class M(Base):
        def __init__(self):
            super().__init__()
            self.net = nn.GRU(6, 16)
            self.out = nn.Linear(16, 3)

        def forward(self, x):
            return self.out(self.net(x)[0])

        def training_step(self, batch, batch_idx):
            x, sizes, y = batch
            return F.cross_entropy(self(x)[sizes - 1, torch.arange(len(y))], y)

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.training_step(batch, batch_idx), batch_size=len(batch[2]))

    def together(rows):
        x, y = zip(*rows, strict=True)
        return pad_sequence(x), torch.tensor([len(t) for t in x]), torch.tensor(y)

    g = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(640):
        y = int(torch.randint(0, 3, (1,), generator=g))
        size = int(torch.randint(8, 20, (1,), generator=g))
        rows.append((torch.randn(size, 6, generator=g) + y, y))
    return (
        M(),
        DataLoader(rows[:480], 32, shuffle=True, collate_fn=together),
        DataLoader(rows[480:], 40, collate_fn=together),
    )


@no_bug()
def error_of_pixels_is_a_sum():
    class M(Codes):
        summed = True

    return M(), *digits()


@no_bug()
def temperature_of_similarities_divides():
    class M(Similar):
        scale = 10

    return M(), *digits()


@no_bug()
def each_sample_has_its_noise():
    return Denoised(), *noisy(seeded=False)


@no_bug()
def weights_before_the_mean():
    class M(Trusted):
        reduction = "none"

    return M(), *trusted()


@no_bug()
def masks_have_the_nearest_class():
    return Pixels(), *loaders(Scenes(480, 0, "nearest"), Scenes(160, 1, "nearest"))


@no_bug()
def share_of_each_class_in_a_smaller_picture():
    """Soft labels of one-hot masks, which are interpolated."""

    class Shares(Scenes):
        def __getitem__(self, index):
            x, _ = super().__getitem__(index)
            shares = F.one_hot(self.masks[index], 4).permute(2, 0, 1).float()
            return x, F.interpolate(shares[None], (12, 12), mode="bilinear")[0]

    return Pixels(), *loaders(Shares(480, 0, "nearest"), Shares(160, 1, "nearest"))


@no_bug()
def features_are_kept_by_sample():
    class M(Cached):
        def features(self, key, x):
            return torch.stack([super(M, self).features(int(k), each[None])[0] for k, each in zip(key, x, strict=True)])

        def key(self, index, batch_idx):
            return index

    return M(), *counted()


@no_bug()
def outputs_are_kept_until_the_epoch_ends():
    class M(Base):
        def __init__(self):
            super().__init__()
            self.outputs = {}

        def training_step(self, batch, batch_idx):
            x, y = batch
            self.outputs[batch_idx] = self(x)
            return F.cross_entropy(self.outputs[batch_idx], y)

        def on_train_epoch_end(self):
            self.log("train/mean", torch.cat([*self.outputs.values()]).mean())
            self.outputs.clear()

    return M(), *digits()


@no_bug()
def who_left_counts_as_alive():
    class M(Survival):
        def hazard(self, x, time, event):
            happens = F.one_hot(time, 10).float() * event[:, None]
            at_risk = torch.arange(10) <= time[:, None]
            loss = F.binary_cross_entropy_with_logits(self.net(x), happens, reduction="none")
            return (loss * at_risk).sum(1).mean()

    return M(), *patients()
