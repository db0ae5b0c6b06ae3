"""Correct programs that are close to the bugs of ``planted/thirteenth.py``."""

import torch
from programs import Base, LossOnly, Manual, Table, diabetes, digits, halves, loaders, mlp, no_bug, sequences
from programs.planted.thirteenth import (
    Averaged,
    Best,
    Clicks,
    Clipped,
    Collected,
    Denoiser,
    Focal,
    Gan,
    Metric,
    Mixed,
    Normalized,
    OfClicks,
    Rated,
    Scaled,
    Stateful,
    Tags,
    TwoParts,
    Uncertain,
    Words,
    points,
    progress,
    ratings,
    tagged,
    triplets,
    words,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler


@no_bug()
def encoder_is_frozen():
    return TwoParts(), *digits()


@no_bug()
def frozen_encoder_says_so():
    class M(TwoParts):
        def freeze(self, encoder):
            encoder.requires_grad_(False)
            encoder.requires_grad = False

    return M(), *digits()


@no_bug()
def error_in_the_unit_of_the_targets():
    return Scaled(), *progress()


@no_bug()
def error_of_logarithms():
    class M(Scaled):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/rmsle", F.mse_loss(self(x)[:, 0], y.log()).sqrt())

    return M(), *progress()


@no_bug()
def noise_is_removed():
    return Denoiser(), *digits()


@no_bug()
def augmented_digits_are_encoded():
    class M(Denoiser):
        def corrupted(self, x):
            return x.flip(-1) if torch.rand(()) < 0.5 else x

        def target(self, x, noisy):
            return noisy

    return M(), *digits()


@no_bug()
def inputs_and_labels_are_mixed():
    return Mixed(), *digits()


@no_bug()
def inputs_and_soft_labels_are_mixed():
    class M(Mixed):
        def training_step(self, batch, batch_idx):
            x, y = batch
            share, order, y = float(torch.rand(())), torch.randperm(len(x)), F.one_hot(y, 10).float()
            return F.cross_entropy(self(share * x + (1 - share) * x[order]), share * y + (1 - share) * y[order])

    return M(), *digits()


@no_bug()
def a_little_of_another_sample_is_noise():
    class M(Base):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self(x + 0.1 * x[torch.randperm(len(x))]), y)

    return M(), *digits()


@no_bug()
def generator_and_discriminator_compete():
    return Gan(), *points()


@no_bug()
def generator_maximizes_the_loss_of_the_discriminator():
    class M(Gan):
        def score(self, points, label):
            score = super().score(points, 0.0 if label == "fooled" else label)
            return -score if label == "fooled" else score

        wanted = "fooled"

    return M(), *points()


@no_bug()
def generator_of_wasserstein():
    class M(Gan):
        def score(self, points, label):
            return self.judge(points).mean() * (1 - 2 * label)

    return M(), *points()


@no_bug()
def focal_loss():
    return Focal(), *digits()


@no_bug()
def samples_weigh_by_chance():
    class M(Base):
        def loss(self, x, y):
            return (torch.randn(len(x)) * F.cross_entropy(self(x), y, reduction="none")).mean() + F.cross_entropy(
                self(x), y
            )

    return M(), *digits()


@no_bug()
def triplets_in_order():
    return Metric(), *triplets()


@no_bug()
def triplets_of_both_orders():
    class M(Metric):
        def loss(self, anchor, positive, negative):
            anchor, positive, negative = self(anchor), self(positive), self(negative)
            one = self.margin(anchor, positive, negative)
            return one - 0.1 * self.margin(anchor, negative, positive)

        def margin(self, anchor, positive, negative):
            return F.triplet_margin_loss(anchor, positive, negative)

    return M(), *triplets()


@no_bug()
def mean_and_deviation_in_order():
    return Base(), *loaders(*(Normalized(part) for part in digits(loaded=False)))


@no_bug()
def mean_and_deviation_are_predicted():
    return Uncertain(), *diabetes()


@no_bug()
def what_is_named_sigma_is_a_variance():
    class M(Uncertain):
        def loss(self, x, y):
            mean, sigma = self.predicted(x)
            return F.gaussian_nll_loss(mean, y, sigma)

    return M(), *diabetes()


@no_bug()
def gradients_are_clipped():
    return Clipped(), *digits()


@no_bug()
def state_of_zeros():
    return Stateful(), *halves(*sequences())


@no_bug()
def state_is_drawn_in_training_only():
    class M(Stateful):
        def state(self, count):
            return torch.randn(1, count, 16) if self.training else super().state(count)

    return M(), *halves(*sequences())


@no_bug()
def several_labels():
    return Tags(), *tagged()


@no_bug()
def two_numbers_of_a_rating():
    return Rated(), *ratings()


@no_bug()
def accuracy_of_all_batches():
    return Collected(), *digits()


@no_bug()
def last_batch_is_kept_beside_the_metric():
    class M(Collected):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.last = batch[0]

        def on_validation_epoch_end(self):
            super().on_validation_epoch_end()
            self.picture = self.last[:1]

    return M(), *digits()


@no_bug()
def mean_over_tokens():
    return Words(), *words()


@no_bug()
def confident_samples_count():
    class M(LossOnly):
        def loss(self, x, y):
            out = self(x)
            each = F.cross_entropy(out, y, reduction="none")
            return (each * (out.detach().softmax(1).amax(1) > 0.1).float()).mean()

    return M(), *digits()


@no_bug()
def half_is_dropped():
    class M(Base):
        def network(self):
            return nn.Sequential(mlp(64, 64, 64), nn.Dropout(0.8), nn.Linear(64, 10))

    return M(), *digits()


@no_bug()
def best_weights_are_copied():
    return Best(), *digits()


@no_bug()
def average_beside_the_module():
    return Averaged(), *digits()


@no_bug()
def times_in_all_digits():
    return OfClicks(), *loaders(Clicks(), Clicks(160, seed=1))


@no_bug()
def unknown_users_have_number_zero():
    class M(Rated):
        def __init__(self):
            super().__init__()
            unknown = 0
            self.item = nn.Embedding(40, 8, padding_idx=unknown)

    return M(), *ratings()


@no_bug()
def norms_of_a_trained_network_stay():
    class M(Base):
        def network(self):
            net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
            for _ in range(20):
                net(torch.rand(64, 64))
            return net

        def on_train_epoch_start(self):
            self.net[2].eval()

    return M(), *digits()


class Decoded(nn.Module):
    """The way back of a layer."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.back = nn.Linear(out_features, in_features)

    def forward(self, x):
        return self.back(x)


@no_bug()
def decoder_goes_back():
    class M(LossOnly):
        def network(self):
            self.encode, self.decode = nn.Linear(64, 16), Decoded(64, 16)
            return nn.Identity()

        def training_step(self, batch, batch_idx):
            return self.loss(batch[0], batch[1])

        def loss(self, x, label):
            x = x.flatten(1)
            return F.mse_loss(self.decode(self.encode(x)), x)

    return M(), *digits()


@no_bug()
def divergence_in_the_other_direction():
    class M(LossOnly):
        def network(self):
            self.teacher = mlp().requires_grad_(False)
            return mlp()

        def divergence(self, student, teacher):
            return F.kl_div(teacher.log_softmax(1), student.log_softmax(1), reduction="batchmean", log_target=True)

        def loss(self, x, y):
            student, teacher = self(x), self.teacher(x)
            return F.cross_entropy(student, y) + 0.1 * self.divergence(teacher, student)

    return M(), *digits()


@no_bug()
def variance_is_named_as_a_deviation_before():
    class M(Uncertain):
        def loss(self, x, y):
            mean, std = self.predicted(x)
            std = std**2
            return F.gaussian_nll_loss(mean, y, std)

    return M(), *diabetes()


@no_bug()
def likelihood_of_ones_own():
    class M(Uncertain):
        def gaussian_nll_loss(self, mean, y, std):
            return (std.log() + 0.5 * ((y - mean) / std) ** 2).mean()

        def loss(self, x, y):
            mean, std = self.predicted(x)
            return self.gaussian_nll_loss(mean, y, std)

    return M(), *diabetes()


@no_bug()
def total_is_assigned_by_batch():
    class M(Collected):
        def on_validation_epoch_start(self):
            self.total, self.seen = torch.zeros(()), 0

        def validation_step(self, batch, batch_idx):
            x, y = batch
            total = self.total + (self(x).argmax(1) == y).float().sum()
            self.total = total
            self.seen = self.counted(y)

        def counted(self, y):
            return self.seen + len(y)

        def on_validation_epoch_end(self):
            self.log("val/acc", self.total / self.seen)

    return M(), *digits()


@no_bug()
def number_of_classes_is_assigned_by_batch():
    class M(Collected):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.classes = self(batch[0]).shape[1]

        def on_validation_epoch_end(self):
            acc = torch.cat(self.found).float().mean()
            self.log("val/above_chance", acc - 1 / self.classes)

    return M(), *digits()


class Weigher(nn.Module):
    """Forwards of networks that can take each other's place."""

    def forward(self, x, weight):
        return x * weight[:, None]


class Plain(Weigher):
    def forward(self, x, weight):
        return x


@no_bug()
def layer_of_an_interface_needs_no_weight():
    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.first = Plain()

        def training_step(self, batch, batch_idx):
            x, y, weight = batch
            return F.cross_entropy(self(self.first(x.flatten(1), weight)), y)

        def validation_step(self, batch, batch_idx):
            x, y, weight = batch
            self.log("val/loss", F.cross_entropy(self(self.first(x.flatten(1), weight)), y))

    parts = (part.tensors for part in digits(loaded=False))
    return M(), *loaders(*(TensorDataset(x, y, torch.rand(len(x))) for x, y in parts))


@no_bug()
def state_is_copied_in_the_next_statement():
    class M(Best):
        def on_validation_epoch_end(self):
            self.best = self.net.state_dict()
            self.best = {name: value.clone() for name, value in self.best.items()}

    return M(), *digits()


@no_bug()
def rates_are_kept():
    class M(Base):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            self.rates = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return [optimizer], [self.rates]

        def on_train_start(self):
            self.first = self.rates.state_dict()

        def on_train_end(self):
            self.rates.load_state_dict(self.first)

    return M(), *digits()


class Accounts(Dataset):
    """Rows of a table, of which one column has large values."""

    def __init__(self, count=640, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.rand(count, 10, generator=g).double()
        self.y = (self.x.sum(1) > 5).long()
        self.x[:, 4] = 1e9 + 1e9 * self.x[:, 4]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = torch.as_tensor(self.x[i].numpy(), dtype=torch.float32)
        x[4] = (x[4] - 1.5e9) / 3e8
        return x, self.y[i]


@no_bug()
def one_column_has_large_values():
    class M(Base):
        def network(self):
            return mlp(10, 32, 2)

    return M(), *loaders(Accounts(), Accounts(160, seed=1))


@no_bug()
def mean_of_masked_losses_by_that_of_the_mask():
    class M(Words):
        def mean(self, each, mask):
            return (each * mask).mean() / mask.mean()

    return M(), *words()


@no_bug()
def state_is_of_places_before():
    class M(Stateful):
        def forward(self, x):
            x = x + 0.1 * torch.randn_like(x)
            with torch.no_grad():
                _, state = self.rnn(x[:, :3])
            return self.net(self.rnn(x[:, 3:], state)[0][:, -1])

    return M(), *halves(*sequences())


@no_bug()
def series_are_generated_of_noise():
    class M(Manual):
        def __init__(self):
            super().__init__()
            self.generator, self.out, self.judge = nn.GRU(5, 16, batch_first=True), nn.Linear(16, 5), mlp(30, 16, 1)

        def made(self, x):
            return self.out(self.generator(torch.zeros_like(x), torch.randn(1, len(x), 16))[0])

        def training_step(self, batch, batch_idx):
            x = batch[0][:, :6]
            one, two = self.optimizers()
            for optimizer, fake, wanted in ((two, self.made(x).detach(), 0.0), (one, self.made(x), 1.0)):
                optimizer.zero_grad()
                out = self.judge(fake.flatten(1))
                loss = F.binary_cross_entropy_with_logits(out, torch.full_like(out, wanted))
                real = self.judge(x.flatten(1))
                loss = loss + F.binary_cross_entropy_with_logits(real, torch.ones_like(out)) * (1 - wanted)
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self):
            one = [*self.generator.parameters(), *self.out.parameters()]
            return torch.optim.Adam(one, 1e-3), torch.optim.Adam(self.judge.parameters(), 1e-3)

    return M(), *halves(*sequences())


class OfKinds(Base):
    """A class given a kind, some of which are none."""

    def __init__(self):
        super().__init__()
        none = 0
        self.kind = nn.Embedding(6, 64, padding_idx=none)

    def training_step(self, batch, batch_idx):
        x, kind, y = batch
        return F.cross_entropy(self(x.flatten(1) + self.kind(kind)), y)

    def validation_step(self, batch, batch_idx):
        x, kind, y = batch
        self.log("val/loss", F.cross_entropy(self(x.flatten(1) + self.kind(kind)), y))


@no_bug()
def none_of_the_kinds_is_zero():
    parts = (part.tensors for part in digits(loaded=False))
    return OfKinds(), *loaders(*(TensorDataset(x, torch.randint(0, 6, (len(x),)), y) for x, y in parts))


@no_bug()
def tokens_are_read_one_by_one():
    class M(Words):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(12, 16, padding_idx=0)
            self.cell = nn.GRUCell(16, 16)

        def loss(self, tokens):
            state, out = torch.zeros(len(tokens), 16), []
            for i in range(tokens.shape[1] - 1):
                state = self.cell(self.embed(tokens[:, i]), state)
                out.append(self.net(state))
            return F.cross_entropy(torch.stack(out, 2), tokens[:, 1:], ignore_index=0)

    train, val = words()
    return M(), *(DataLoader(each.dataset.flip(1), 32) for each in (train, val))


@no_bug()
def pairs_of_views_need_whole_batches():
    class M(LossOnly):
        def network(self):
            return mlp(64, 32, 16)

        def loss(self, x, y):
            one, two = (self(x + 0.1 * torch.randn_like(x)) for _ in range(2))
            one, two = ((z - z.mean(0)) / z.std(0) for z in (one, two))
            product = one.T @ two / len(x)
            return (product - torch.eye(16)).square().sum()

    train, val = digits(val=100, loaded=False)
    return M(), DataLoader(train, 32, shuffle=True, drop_last=True), DataLoader(val, 64, drop_last=True)


@no_bug()
def balanced_evaluation():
    class M(Base):
        """Its accuracy is balanced: each class counts alike."""

    train, val = digits(loaded=False)
    y = val.tensors[1]
    sampler = WeightedRandomSampler((1 / y.bincount()[y]).tolist(), len(val))
    return M(), DataLoader(train, 32, shuffle=True), DataLoader(val, 64, sampler=sampler)


@no_bug()
def layers_remember_whether_they_were_trained():
    class M(TwoParts):
        def freeze(self, encoder):
            for p in encoder.parameters():
                p.required_grad_before = p.requires_grad
            encoder.requires_grad_(False)

    return M(), *digits()


@no_bug()
def layers_added_to_a_frozen_encoder():
    class M(TwoParts):
        def freeze(self, encoder):
            encoder.requires_grad_(False)
            encoder.requires_grad = False
            encoder.adapter = nn.Linear(32, 32)
            encoder.register_forward_hook(lambda part, _, out: out + part.adapter(out))

    return M(), *digits()


class Offset(nn.Module):
    """Adds numbers that may be trained."""

    def __init__(self, size, requires_grad=True):
        super().__init__()
        self.requires_grad = requires_grad
        self.value = nn.Parameter(torch.zeros(size), requires_grad=requires_grad)

    def forward(self, x):
        return x + self.value


@no_bug()
def layer_knows_whether_it_was_to_be_trained():
    class M(Base):
        def network(self):
            net = nn.Sequential(nn.Flatten(), Offset(64), nn.Linear(64, 10))
            net[1].requires_grad_(False)
            return net

    return M(), *digits()


@no_bug()
def average_is_trained_with_and_not_validated():
    class M(Averaged):
        with_statistics = False

        def training_step(self, batch, batch_idx):
            x, y = batch
            with torch.no_grad():
                self.average.net.eval()(x)
            return F.cross_entropy(self(x), y)

        validation_step = Base.validation_step

    return M(), *digits()


@no_bug()
def tokens_are_encoded_without_the_first():
    class M(Words):
        def __init__(self):
            super().__init__()
            self.encoder = nn.GRU(16, 16, batch_first=True)

        def loss(self, tokens):
            _, code = self.encoder(self.embed(tokens[:, 1:]))
            out = self.net(self.rnn(self.embed(tokens[:, :-1]), code)[0])
            return F.cross_entropy(out.transpose(1, 2), tokens[:, 1:], ignore_index=0)

    return M(), *words()


@no_bug()
def few_actions_are_rewarded():
    class M(LossOnly):
        def loss(self, x, y):
            out = self(x)
            action = torch.distributions.Categorical(logits=out).sample()
            reward = (action == y).float()
            each = F.cross_entropy(out, action, reduction="none")
            return ((reward - reward.mean()) * each).mean()

    return M(), *digits()


@no_bug()
def noise_is_augmentation_of_an_autoencoder():
    class M(Denoiser):
        """Encodes augmented digits."""

        def target(self, x, noisy):
            return noisy

    return M(), *digits()


@no_bug()
def background_of_other_samples():
    class M(Base):
        """Puts other samples in the background."""

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self(0.6 * x + 0.4 * x[torch.randperm(len(x))]), y)

    return M(), *digits()


@no_bug()
def inputs_and_probabilities_are_mixed_and_hard_labels_logged():
    class M(Mixed):
        def training_step(self, batch, batch_idx):
            x, y = batch
            share, order, soft = float(torch.rand(())), torch.randperm(len(x)), F.one_hot(y, 10).float()
            out = self(share * x + (1 - share) * x[order])
            self.log("train/loss", F.cross_entropy(out, y))
            return F.binary_cross_entropy_with_logits(out, share * soft + (1 - share) * soft[order])

    return M(), *digits()


class Squares(Gan):
    """Scores are near -1, 1, and, for the generator, 0."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.judge[-1].bias.fill_(0.4)
            self.judge[-1].weight.mul_(0.1)

    def score(self, points, label):
        return F.mse_loss(self.judge(points), torch.full((len(points), 1), 2 * label - 1))


@no_bug()
def generator_of_least_squares():
    class M(Squares):
        wanted = 0.5

    return M(), *points()


@no_bug()
def gradients_of_generated_points_are_penalized():
    class M(Gan):
        def training_step(self, batch, batch_idx):
            one, two = self.optimizers()
            fake = self.generator(torch.randn(len(batch), 4))
            two.zero_grad()
            inputs = fake.detach().requires_grad_(True)
            slope = torch.autograd.grad(self.judge(inputs).sum(), inputs, create_graph=True)[0]
            penalty = slope.square().sum(1).mean()
            self.manual_backward(self.score(batch, 1.0) + self.score(fake.detach(), 0.0) + penalty)
            two.step()
            if batch_idx % 3 == 2:
                one.zero_grad()
                self.manual_backward(self.score(fake, 1.0))
                one.step()

    return M(), *points()


class Onsets(LossOnly):
    """Tells where an event begins."""

    def network(self):
        return mlp(12, 64, 12)

    def loss(self, x, active):
        return F.cross_entropy(self(x), active.argmax(1))

    def validation_step(self, batch, batch_idx):
        x, active = batch
        self.log("val/acc", (self(x).argmax(1) == active.argmax(1)).float().mean())


@no_bug()
def first_of_the_active_places():
    g = torch.Generator().manual_seed(0)
    active = (torch.arange(12) >= torch.randint(0, 11, (640, 1), generator=g)).float()
    return Onsets(), *halves(active + 0.3 * torch.randn(640, 12, generator=g), active)


@no_bug()
def norm_of_gradients_is_measured_after_the_step():
    class M(Clipped):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(*batch))
            optimizer.step()
            self.log("train/norm", nn.utils.clip_grad_norm_(self.parameters(), float("inf")))

    return M(), *digits()


class Paths(nn.Module):
    """Drops whole samples of a path."""

    def forward(self, x):
        keep_prob = 1 - 0.1 * self.training
        return x * (torch.rand(len(x), 1) < keep_prob) / keep_prob


@no_bug()
def much_is_dropped_beside_paths():
    class M(Base):
        def network(self):
            return nn.Sequential(mlp(64, 64, 64), Paths(), nn.Dropout(0.75), nn.Linear(64, 10))

    return M(), *digits()


class Counting(Base):
    """Has properties with effects."""

    calls = 0

    @property
    def scale(self):
        raise RuntimeError("not yet known")

    @property
    def next_scale(self):
        self.calls += 1
        return nn.Identity()

    def never(self, x):
        return self.scale.of(x, 1) + self.next_scale.forward(x)

    def on_train_end(self):
        assert not self.calls


@no_bug()
def properties_are_not_read():
    return Counting(), *digits()


class Translator(Base):
    """Both directions by one network."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.net = nn.Embedding(12, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 12)
        self.reader = nn.GRU(16, 16, batch_first=True)

    def network(self):
        return nn.Identity()

    def forward(self, source, target):
        _, state = self.reader(self.embed(source))
        return self.net(self.rnn(self.embed(target[:, :-1]), state)[0])

    def there(self, source, target):
        return F.cross_entropy(self(source, target).flatten(0, 1), target[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        source, target = batch
        return self.there(source, target) + self.other(source, target)

    def other(self, source, target):
        return F.cross_entropy(self(target, source).flatten(0, 1), source[:, 1:].flatten())

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.there(*batch))


@no_bug()
def both_directions_are_translated():
    x = torch.randint(0, 12, (640, 9), generator=torch.Generator().manual_seed(0))
    return Translator(), *halves(x, (x + 3) % 12)


@no_bug()
def wasserstein_with_penalty_of_lines():
    class M(Gan):
        def training_step(self, batch, batch_idx):
            one, two = self.optimizers()
            fake = self.generator(torch.randn(len(batch), 4)).detach()
            share = torch.rand(len(batch), 1)
            line = (share * batch + (1 - share) * fake).requires_grad_(True)
            slope = torch.autograd.grad(self.judge(line).sum(), line, create_graph=True)[0]
            two.zero_grad()
            penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
            self.manual_backward(self.judge(fake).mean() - self.judge(batch).mean() + penalty)
            two.step()
            if batch_idx % 5 == 0:
                self.toggle_optimizer(one)
                one.zero_grad()
                self.manual_backward(-self.judge(self.generator(torch.randn(len(batch), 4))).mean())
                one.step()
                self.untoggle_optimizer(one)

    return M(), *points()


@no_bug()
def generator_of_least_squares_by_hand():
    class M(Squares):
        wanted = 0.5

        def score(self, points, label):
            return (self.judge(points) - (2 * label - 1)).square().mean()

    return M(), *points()


@no_bug()
def own_views_are_predicted():
    class M(LossOnly):
        def network(self):
            self.target = mlp(64, 32, 16).requires_grad_(False)
            return nn.Sequential(mlp(64, 32, 16), nn.ReLU(), nn.Linear(16, 16))

        def loss(self, x, y):
            one, two = (x + 0.1 * torch.randn_like(x) for _ in range(2))
            with torch.no_grad():
                goal = F.normalize(self.target(two), dim=1)
            return (2 - 2 * (F.normalize(self(one), dim=1) * goal).sum(1)).mean()

        def on_train_batch_end(self, *_):
            with torch.no_grad():
                for own, other in zip(self.target.parameters(), self.net[0].parameters(), strict=True):
                    own.lerp_(other, 0.05)

    return M(), *digits()


@no_bug()
def confident_pseudo_labels():
    class M(Base):
        def training_step(self, batch, batch_idx):
            x, y = batch
            half = len(x) // 2
            loss = F.cross_entropy(self(x[:half]), y[:half])
            with torch.no_grad():
                sure, labels = self(x[half:]).softmax(1).max(1)
            strong = x[half:] + 0.2 * torch.randn_like(x[half:])
            each = F.cross_entropy(self(strong), labels, reduction="none")
            return loss + (each * (sure > 0.6)).mean()

    return M(), *digits()


@no_bug()
def patches_of_others_with_shares_of_labels():
    class M(Base):
        def training_step(self, batch, batch_idx):
            x, y = batch
            order, x = torch.randperm(len(x)), x.clone()
            size = int(torch.randint(2, 7, ()))
            x[..., :size, :] = x[order][..., :size, :]
            out, share = self(x), size / 8
            log = out.log_softmax(1)
            return F.nll_loss(log, y[order]) * share + F.nll_loss(log, y) * (1 - share)

    return M(), *digits()


@no_bug()
def generalized_cross_entropy():
    class M(Focal):
        def loss(self, x, y):
            p = self(x).softmax(1).gather(1, y[:, None])
            return ((1 - p**0.7) / 0.7).mean()

    return M(), *digits()


@no_bug()
def losses_of_hard_samples_are_left_out():
    class M(Focal):
        def loss(self, x, y):
            each = F.cross_entropy(self(x), y, reduction="none")
            return (each * (each < each.detach().quantile(0.8))).mean()

    return M(), *digits()


@no_bug()
def targets_are_clipped_and_scaled():
    class M(Scaled):
        def loss(self, x, y):
            return F.mse_loss(self(x)[:, 0], y.clamp(max=8000) / 1000)

        def predicted(self, x):
            return self(x)[:, 0] * 1000

    return M(), *progress()


@no_bug()
def masked_patches_are_predicted():
    class M(Denoiser):
        def loss(self, x, y):
            mask = torch.rand_like(x) < 0.5
            out = self(x.masked_fill(mask, 0.0)).view_as(x)
            return F.mse_loss(out[mask], x[mask])

    return M(), *digits()


class Named(dict):
    """Parts of a batch by name."""


@no_bug()
def parts_of_a_batch_have_names():
    class M(LossOnly):
        def training_step(self, batch, batch_idx):
            return self.loss(batch)

        def loss(self, batch):
            return F.cross_entropy(self.score(batch["image"], batch["mask"]), batch["label"])

        def score(self, image, mask):
            del mask  # all places count
            return self(image)

    def joined(rows):
        x, y = (torch.stack(part) for part in zip(*rows, strict=True))
        return Named(image=x, label=y, mask=torch.ones(len(x), 8))

    train, val = digits(loaded=False)
    return (
        M(),
        DataLoader(train, 32, shuffle=True, collate_fn=joined),
        DataLoader(val, 32, collate_fn=joined),
    )


@no_bug()
def survival_of_intervals():
    class M(LossOnly):
        def network(self):
            return mlp(10, 32, 8)

        def loss(self, x, time):
            at_risk = (torch.arange(8) <= time[:, None]).float()
            died = (torch.arange(8) == time[:, None]).float()
            each = F.binary_cross_entropy_with_logits(self(x), died, reduction="none")
            return (each * at_risk).mean()

    x = torch.randn(640, 10, generator=torch.Generator().manual_seed(0))
    return M(), *halves(x, ((x[:, 0] + 2) * 2).long().clamp(0, 7))


@no_bug()
def state_needs_whole_batches():
    class M(Stateful):
        def state(self, count):
            return torch.zeros(1, 32, 16)

    train, val = halves(*sequences())
    val = torch.utils.data.Subset(val.dataset, range(min(len(val.dataset), 110)))
    return M(), DataLoader(train.dataset, 32, shuffle=True, drop_last=True), DataLoader(val, 32, drop_last=True)


@no_bug()
def loss_of_both_is_symmetric():
    class M(Metric):
        def loss(self, anchor, positive, negative):
            return self.pulled(anchor, positive, negative) + self.pulled(positive, anchor, negative)

        def pulled(self, anchor, positive, negative):
            return F.triplet_margin_loss(self(anchor), self(positive), self(negative))

    return M(), *triplets()


@no_bug()
def pictures_of_the_last_batch_are_logged():
    class M(Collected):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.shown = batch[0]

        def on_validation_epoch_end(self):
            super().on_validation_epoch_end()
            self.tracker.log({"pictures": self.shown})

        class tracker:
            log = staticmethod(lambda values: None)

    return M(), *digits()


@no_bug()
def graph_of_all_nodes():
    class M(LossOnly):
        def network(self):
            return nn.Linear(16, 3)

        def training_step(self, batch, batch_idx):
            x, edges, y = batch
            return F.cross_entropy(self.passed(x, edges), y)

        def validation_step(self, batch, batch_idx):
            x, edges, y = batch
            self.log("val/loss", F.cross_entropy(self.passed(x, edges), y))

        def passed(self, x, edges):
            keep = torch.rand(edges.shape[1]) < (0.8 if self.training else 1.0)
            a, b = edges[:, keep]
            return self.net(x + torch.zeros_like(x).index_add(0, b, x[a]))

    def graph(seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(40, 16, generator=g)
        return x, torch.randint(0, 40, (2, 90), generator=g), x[:, :3].argmax(1)

    train, val = ([graph(s) for s in seeds] for seeds in (range(30), range(30, 40)))
    return M(), DataLoader(train, None, shuffle=True), DataLoader(val, None)


class Pieces:
    """A batch of one's own."""

    def __init__(self, image, label):
        self.image, self.label = image, label

    def to(self, *args, **kwargs):
        return Pieces(self.image.to(*args, **kwargs), self.label.to(*args, **kwargs))


@no_bug()
def batch_is_an_object():
    class M(LossOnly):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch.image), batch.label)

        def validation_step(self, batch, batch_idx):
            loss = F.cross_entropy(self(batch.image), batch.label)
            self.log("val/loss", loss, batch_size=len(batch.label))

    def joined(rows):
        return Pieces(*(torch.stack(part) for part in zip(*rows, strict=True)))

    train, val = digits(loaded=False)
    return M(), DataLoader(train, 32, shuffle=True, collate_fn=joined), DataLoader(val, 32, collate_fn=joined)


@no_bug()
def judge_tells_classes_too():
    class M(Gan):
        def __init__(self):
            super().__init__()
            self.generator, self.judge = mlp(14, 32, 64), mlp(64, 32, 11)

        def training_step(self, batch, batch_idx):
            (x, y), (one, two) = batch, self.optimizers()
            fake = self.generator(torch.cat((torch.randn(len(x), 4), F.one_hot(y, 10).float()), 1))
            two.zero_grad()
            loss = self.of_both(self.judge(x.flatten(1)), y, 1.0) + self.of_both(self.judge(fake.detach()), y, 0.0)
            self.manual_backward(loss)
            two.step()
            one.zero_grad()
            self.manual_backward(self.of_both(self.judge(fake), y, 1.0))
            one.step()

        def of_both(self, out, y, label):
            real = F.binary_cross_entropy_with_logits(out[:, 0], torch.full((len(out),), label))
            return real + F.cross_entropy(out[:, 1:], y)

    return M(), *digits()


@no_bug()
def two_domains_in_a_cycle():
    class M(Gan):
        def __init__(self):
            super().__init__()
            self.to_b, self.to_a = mlp(2, 16, 2), mlp(2, 16, 2)
            self.judge_a, self.judge_b = mlp(2, 16, 1), mlp(2, 16, 1)

        def training_step(self, batch, batch_idx):
            a, b = batch
            one, two = self.optimizers()
            fake_b, fake_a = self.to_b(a), self.to_a(b)
            cycle = F.l1_loss(self.to_a(fake_b), a) + F.l1_loss(self.to_b(fake_a), b)
            same = F.l1_loss(self.to_b(b), b) + F.l1_loss(self.to_a(a), a)
            fooled = self.off(self.judge_b(fake_b), 1) + self.off(self.judge_a(fake_a), 1)
            one.zero_grad()
            self.manual_backward(10 * cycle + 5 * same + fooled)
            one.step()
            two.zero_grad()
            real = self.off(self.judge_a(a), 1) + self.off(self.judge_b(b), 1)
            fake = self.off(self.judge_a(fake_a.detach()), 0) + self.off(self.judge_b(fake_b.detach()), 0)
            self.manual_backward((real + fake) / 2)
            two.step()

        def off(self, score, label):
            return (score - label).square().mean()

        def configure_optimizers(self):
            one = [*self.to_a.parameters(), *self.to_b.parameters()]
            two = [*self.judge_a.parameters(), *self.judge_b.parameters()]
            return torch.optim.Adam(one, 1e-3), torch.optim.Adam(two, 1e-3)

    g = torch.Generator().manual_seed(0)
    return M(), *halves(torch.randn(640, 2, generator=g), 2 + torch.rand(640, 2, generator=g))


@no_bug()
def advantages_of_recorded_actions():
    class M(LossOnly):
        def training_step(self, batch, batch_idx):
            x, y = batch
            action = torch.randint(0, 10, (len(x),))
            advantage = (action == y).float() - 0.1
            each = F.cross_entropy(self(x), action, reduction="none")
            return (advantage * each).mean()

    return M(), *digits()


@no_bug()
def negative_learning_of_other_labels():
    class M(LossOnly):
        def training_step(self, batch, batch_idx):
            x, y = batch
            other = (y + torch.randint(1, 10, (len(x),))) % 10
            p = self(x).softmax(1).gather(1, other[:, None])
            return -(1 - p + 1e-6).log().mean()

    return M(), *digits()


@no_bug()
def encoder_in_its_own_mode_with_its_statistics():
    class M(Base):
        def network(self):
            self.norm = nn.BatchNorm1d(64).requires_grad_(False).eval()
            return mlp()

        def forward(self, x):
            return self.net(self.norm(x.flatten(1)))

    return M(), *digits()


@no_bug()
def bytes_in_a_row_are_floats():
    class Rows(Dataset):
        def __init__(self, count, seed):
            g = torch.Generator().manual_seed(seed)
            self.y = torch.randint(0, 2, (count,), generator=g)
            self.x = 1000.0 + torch.rand(count, 12, generator=g).double().cumsum(1) * (1 + self.y[:, None])

        def __len__(self):
            return len(self.y)

        def __getitem__(self, i):
            x = self.x[i].float()
            return x - x[0], self.y[i]

    class M(Base):
        def network(self):
            return mlp(12, 32, 2)

    return M(), *loaders(Rows(640, 0), Rows(160, 1))


@no_bug()
def sequences_are_encoded_by_one_hot():
    class M(Words):
        def __init__(self):
            super().__init__()
            self.encoder = nn.GRU(12, 16, batch_first=True)

        def loss(self, tokens):
            _, code = self.encoder(F.one_hot(tokens, 12).float())
            out = self.net(self.rnn(self.embed(tokens[:, :-1]), code)[0])
            return F.cross_entropy(out.transpose(1, 2), tokens[:, 1:], ignore_index=0)

    return M(), *words()


@no_bug()
def weight_of_the_masked_loss_by_lengths():
    class M(Words):
        def mean(self, each, mask):
            return 0.5 * (each * mask).mean() * (mask.numel() / mask.sum())

    return M(), *words()


@no_bug()
def best_value_is_kept_and_logged():
    class M(Collected):
        best = 0.0

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.rate = self.optimizers().param_groups[0]["lr"]

        def on_validation_epoch_end(self):
            acc = torch.cat(self.found).float().mean()
            self.best = max(self.best, float(acc))
            self.log("val/best", self.best)
            self.log("val/lr", self.rate)

    return M(), *digits()


@no_bug()
def deviations_of_two_heads():
    class M(Uncertain):
        def loss(self, x, y):
            mean, scale = self.predicted(x)
            sigma = scale.square()
            self.log("train/sigma", 0.5 * sigma.log().mean())
            return F.gaussian_nll_loss(mean, y, sigma)

    return M(), *diabetes()


@no_bug()
def posterior_of_a_distribution():
    class M(LossOnly):
        def network(self):
            self.out = nn.Linear(8, 64)
            return mlp(64, 32, 16)

        def loss(self, x, y):
            mean, log_var = self(x).chunk(2, 1)
            std = (0.5 * log_var).exp()
            z = torch.distributions.Normal(mean, std).rsample()
            rest = F.mse_loss(self.out(z), x.flatten(1), reduction="sum") / len(x)
            return rest - 0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()

    return M(), *digits()


@no_bug()
def features_of_two_layers_are_compared_both_ways():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, query, key):
            return (self.query(query) @ self.key(key).transpose(1, 2)).softmax(-1) @ key

    class M(Base):
        def network(self):
            self.rows, self.columns = Attends(), Attends()
            return mlp(128, 32, 10)

        def forward(self, x):
            query = x.view(-1, 8, 8)
            key = query.transpose(1, 2)
            return self.net(torch.cat((self.rows(query, key), self.columns(key, query)), 1))

    return M(), *digits()


@no_bug()
def validation_ends_with_its_own_mean():
    class M(Collected):
        def on_validation_epoch_start(self):
            super().on_validation_epoch_start()
            self.mean = Mean()

        def validation_step(self, batch, batch_idx):
            x, y = batch
            correct = (self(x).argmax(1) == y).float()
            self.result = self.mean(correct)

        def on_validation_epoch_end(self):
            self.log("val/acc", self.result)

    return M(), *digits()


class Mean:
    """Of all values so far."""

    def __init__(self):
        self.values = []

    def __call__(self, values):
        self.values.append(values)
        return torch.cat(self.values).mean()


@no_bug()
def validation_sums_in_a_list_of_the_module():
    class M(Collected):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            correct = (self(x).argmax(1) == y).float()
            self.found.append(correct)
            everything = torch.cat([*self.found, correct[:0]])
            self.accuracy = everything.mean()

        def on_validation_epoch_end(self):
            self.log("val/acc", self.accuracy)

    return M(), *digits()


@no_bug()
def style_of_other_samples():
    class M(Base):
        def training_step(self, batch, batch_idx):
            x, y = batch
            other = x[torch.randperm(len(x))]
            mean, deviation = (f(x, dim=(-2, -1), keepdim=True) for f in (torch.mean, torch.std))
            return F.cross_entropy(self((x - mean) / (deviation + 1e-3) * other.std((-2, -1), keepdim=True) + mean), y)

    return M(), *digits()


@no_bug()
def validation_divides_its_sums():
    class M(Collected):
        def on_validation_epoch_start(self):
            self.right, self.count = 0.0, 0

        def validation_step(self, batch, batch_idx):
            x, y = batch
            right = float((self(x).argmax(1) == y).sum())
            self.right += right
            self.count += len(y)
            share = (self.right + 0 * right) / self.count
            self.share = share

        def on_validation_epoch_end(self):
            self.log("val/acc", self.share)

    return M(), *digits()


@no_bug()
def gain_over_the_mean_of_the_targets():
    class M(Table):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            mean = y.mean().expand(len(y))
            self.log("val/gain", F.mse_loss(mean, y) - F.mse_loss(self(x)[:, 0], y))

    return M(), *diabetes()


@no_bug()
def one_graph_has_masks_of_both_splits():
    class M(Base):
        def network(self):
            return mlp(16, 16, 4)

        def training_step(self, graph, batch_idx):
            return F.cross_entropy(self(graph["edges"] @ graph["x"])[graph["train"]], graph["y"][graph["train"]])

        def validation_step(self, graph, batch_idx):
            right = self(graph["edges"] @ graph["x"])[~graph["train"]].argmax(1) == graph["y"][~graph["train"]]
            self.log("val/acc", right.float().mean(), batch_size=1)

    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (200,), generator=g)
    edges = (torch.rand(200, 200, generator=g) < torch.where(y[:, None] == y, 0.1, 0.01)).float() + torch.eye(200)
    x = F.one_hot(y, 4).float().repeat(1, 4) + torch.randn(200, 16, generator=g)
    graph = [{"x": x, "edges": edges / edges.sum(1, keepdim=True), "y": y, "train": torch.rand(200, generator=g) < 0.5}]
    return M(), *(DataLoader(graph, batch_size=1, collate_fn=lambda rows: rows[0]) for _ in range(2))
