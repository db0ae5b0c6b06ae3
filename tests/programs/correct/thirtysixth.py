"""Programs of which a part is named, built or used as in a mistake, though another part of them shows what is meant."""

import copy

import torch
from programs import Base, LossOnly, Manual, digits, halves, loaders, mlp, no_bug
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, random_split


def two_layers(inputs, outputs, hidden=32):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def normals(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shares(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def numbers(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


class Columns(Dataset):
    """Samples that have names for their parts."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}


def named_halves(split, **columns):
    parts = ({name: c[rows] for name, c in columns.items()} for rows in (slice(split), slice(split, None)))
    return loaders(*(Columns(**part) for part in parts))


@no_bug()
def stocks_are_standardized_within_each_day():
    class Net(LossOnly):
        def network(self):
            return two_layers(6, 1)

        def loss(self, x, y):
            return F.mse_loss(self(x)[:, 0], y)

    x = normals(30, 60, 6) * (1 + shares(1, 60, 6)) + normals(1, 60, 6, seed=1)
    x = (x - x.mean(0)) / x.std(0, correction=0)
    y = 0.3 * x[..., 0] - 0.2 * x[..., 1] * x[..., 2] + normals(30, 60, seed=2)
    days = slice(0, 45), slice(45, None)  # rows are all days of a stock, then those of the next one
    return Net(), *loaders(*(TensorDataset(x[:, part].reshape(-1, 6), y[:, part].flatten()) for part in days))


class Robust(LossOnly):
    """Weighs groups by how bad they are."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.full((4,), 0.25))

    def network(self):
        return two_layers(32, 2)

    def training_step(self, batch, batch_idx):
        x, y, group = batch
        member = F.one_hot(group, 4).float()
        each = F.cross_entropy(self(x), y, reduction="none")
        losses = (member * each[:, None]).sum(0) / member.sum(0).clamp(min=1)
        self.weights = (self.weights.log() + 0.01 * losses.detach()).softmax(0)
        return (self.weights * losses).sum()

    def validation_step(self, batch, batch_idx):
        self.log("val/acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())


@no_bug()
def each_split_has_all_groups_of_a_robust_loss():
    class Birds(Dataset):
        def __init__(self, x, y, places):
            self.x, self.y, self.groups = x, y, (2 * y + places).tolist()

        def __len__(self):
            return len(self.y)

        def __getitem__(self, index):
            return self.x[index], self.y[index], self.groups[index]

    y = numbers(2, 800)
    places = torch.where(shares(800) < 0.85, y, 1 - y)
    x = normals(800, 32) + torch.stack([y * 0.8, places * 1.5], 1).repeat(1, 16)
    return Robust(), *loaders(*random_split(Birds(x, y, places), [600, 200], torch.Generator().manual_seed(0)))


@no_bug()
def dynamics_are_learned_of_logged_episodes():
    class Net(LossOnly):
        def network(self):
            return two_layers(8, 6)

        def loss(self, batch):
            change = self(torch.cat([batch["observations"], batch["actions"]], 1))
            return F.mse_loss(batch["observations"] + change, batch["next_observations"])

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    state, action = normals(800, 6), normals(800, 2, seed=1)
    after = state + 0.3 * torch.tanh(state.roll(1, 1) + action.repeat(1, 3))
    ends = {"rewards": -after[:, 0].abs(), "terminals": (torch.arange(800) % 50 == 49).float()}
    return Net(), *named_halves(600, observations=state, actions=action, next_observations=after, **ends)


class Matcher(LossOnly):
    """Tells which captions are those of their pictures."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(60, 32)
        self.head = two_layers(96, 1)

    def network(self):
        return two_layers(48, 32)

    def loss(self, pictures, captions, is_match):
        a, b = self(pictures), self.words(captions).mean(1)
        return F.binary_cross_entropy_with_logits(self.head(torch.cat([a, b, a * b], 1))[:, 0], is_match)


@no_bug()
def captions_of_half_of_the_batch_are_exchanged():
    def exchange(samples):
        pictures, captions = default_collate(samples)
        order = torch.arange(len(pictures))
        half = torch.randperm(len(pictures))[: len(pictures) // 2]
        order[half] = order[half].roll(1)
        return pictures, captions[order], (order == torch.arange(len(order))).float()

    captions = numbers(60, 640, 6)
    pictures = normals(60, 48)[captions].mean(1) + 0.1 * normals(640, 48, seed=1)
    parts = (TensorDataset(pictures[rows], captions[rows]) for rows in (slice(480), slice(480, None)))
    return Matcher(), *(DataLoader(part, 32, shuffle=True, collate_fn=exchange) for part in parts)


@no_bug()
def decisions_of_frames_are_smoothed_in_validation():
    class Net(LossOnly):
        def network(self):
            return nn.Sequential(nn.Conv1d(16, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 3, 5, padding=2))

        def loss(self, x, y):
            return F.binary_cross_entropy_with_logits(self(x), y)

        def smooth(self, active):
            return F.pad(active.float(), (2, 2), mode="replicate").unfold(-1, 5, 1).median(-1).values

        def validation_step(self, batch, batch_idx):
            self.log("val/acc", (self.smooth(self(batch[0]) > 0) == batch[1]).float().mean())

    begins, sizes, t = numbers(38, 300, 3, 2, 1), numbers(11, 300, 3, 2, 1, seed=1) + 1, torch.arange(50)
    y = ((t >= begins) & (t < begins + sizes)).any(2).float()
    x = torch.einsum("nct,cf->nft", y, normals(3, 16)) + normals(300, 16, 50, seed=1)
    return Net(), *halves(x, y, split=240)


@no_bug()
def weight_of_a_patient_is_a_fact():
    class Net(LossOnly):
        def network(self):
            return mlp(outputs=2)

        def loss(self, batch):
            return F.cross_entropy(self(batch["image"]), batch["label"])

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    x, y = digits(960, loaded=False)[0].tensors
    age, height, weight = (torch.tensor([60.0, 172, 76]) + normals(960, 3) * torch.tensor([12.0, 9, 14])).T
    return Net(), *named_halves(640, image=x, label=(y > 4).long(), age=age, height=height, weight=weight)


class Adversary(Manual):
    """A generator, whose step is the first one, and a critic with the hinge loss."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(two_layers(16, 64, 64), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def network(self):
        return None

    def training_step(self, batch, batch_idx):
        x = 2 * batch[0].flatten(1) - 1
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(-self.discriminator(self.generator(torch.randn(len(x), 16))).mean())
        first.step()
        fake = self.generator(torch.randn(len(x), 16)).detach()
        loss = F.relu(1 - self.discriminator(x)).mean() + F.relu(1 + self.discriminator(fake)).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(p.parameters(), 2e-4, betas=(0.0, 0.9)) for p in (self.generator, self.discriminator)]


@no_bug()
def critic_has_no_error_beyond_the_margin():
    return Adversary(), *digits(batch=64)


class Codec(Manual):
    """An encoder and decoder, with critics for several rates, which are trained in each second batch."""

    def __init__(self, num_disc=3):
        super().__init__()
        self.save_hyperparameters()
        critics = (nn.Sequential(nn.Conv1d(1, 8, 5, 2), nn.LeakyReLU(), nn.Conv1d(8, 1, 5, 2)) for _ in range(num_disc))
        self.disc = nn.ModuleList(critics)

    def network(self):
        return nn.Sequential(nn.Conv1d(1, 8, 4, 2, 1), nn.ELU(), nn.ConvTranspose1d(8, 1, 4, 2, 1))

    def scores(self, x):
        return [critic(F.avg_pool1d(x, 2**i)) for i, critic in enumerate(self.disc)]

    def training_step(self, batch, batch_idx):
        x, y = batch, self(batch)
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(10 * F.l1_loss(y, x) + sum(F.relu(1 - s).mean() for s in self.scores(y)) / 3)
        first.step()
        if batch_idx % 2 == 0:
            pairs = zip(self.scores(x), self.scores(y.detach()), strict=True)
            loss = sum(F.relu(1 - real).mean() + F.relu(1 + fake).mean() for real, fake in pairs) / 3
            second.zero_grad()
            self.manual_backward(loss)
            second.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), 1e-3), torch.optim.Adam(self.disc.parameters(), 1e-3)


@no_bug()
def number_of_critics_is_not_that_of_their_steps():
    t = torch.arange(64) / 64
    return Codec(), *halves(torch.sin(6.28 * ((shares(480, 1, 1) * 8 + 1) * t + shares(480, 1, 1, seed=1))), split=400)


@no_bug()
def distance_from_the_first_weights_is_logged():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.initial = copy.deepcopy(self.net).requires_grad_(False)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            out = self(x)
            drift = F.kl_div(self.initial(x).log_softmax(1), out.log_softmax(1), log_target=True, reduction="batchmean")
            self.log_dict({"val/acc": (out.argmax(1) == y).float().mean(), "val/drift": drift})

    return Net(), *digits()


class Graphs(LossOnly):
    """Adds the number of nodes before a graph to its edges."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 1)

    def network(self):
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU())

    def loss(self, x, edges, owner, edge_owner, y):
        sizes = owner.bincount()
        source, target = edges + (sizes.cumsum(0) - sizes)[edge_owner]
        h = self(torch.cat([x[source], x[target]], 1))
        return F.mse_loss(self.head(h.new_zeros(len(sizes), 32).index_add(0, edge_owner, h))[:, 0] / 10, y)


@no_bug()
def network_itself_shifts_the_edges():
    def join(graphs):
        xs, edges, ys = zip(*graphs, strict=True)
        counts = torch.tensor([[len(x) for x in xs], [e.shape[1] for e in edges]])
        owners = (torch.arange(len(graphs)).repeat_interleave(count) for count in counts)
        return torch.cat(xs), torch.cat(edges, 1), *owners, torch.tensor(ys)

    graphs = []
    for i, n in enumerate((numbers(8, 300) + 6).tolist()):
        x, (source, target) = normals(n, 8, seed=i), (shares(n, n, seed=i) < 0.3).nonzero().T
        graphs.append((x, torch.stack([source, target]), float((x[source, 0] * x[target, 0]).sum() / 10)))
    return Graphs(), *(DataLoader(g, 16, shuffle=True, collate_fn=join) for g in (graphs[:240], graphs[240:]))


@no_bug()
def features_are_standardized_before_their_alignment():
    def gram(x):
        x = F.normalize(x - x.mean(0), dim=0)
        return x @ x.T

    class Net(Base):
        def __init__(self):
            super().__init__()
            self.teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU()).requires_grad_(False)

        def loss(self, x, y):
            h = self.net[:3](x)
            a, b = gram(h), gram(self.teacher(x))
            return F.cross_entropy(self.net[3](h), y) + 1 - (a * b).sum() / (a.norm() * b.norm())

    return Net(), *digits(batch=64)


class DropPatches(nn.Module):
    def forward(self, patches):
        dropped = torch.rand(patches.shape[:2]).argsort(1) < patches.shape[1] // 2
        return patches.masked_fill(dropped[..., None], 0.0), dropped


class Hidden(LossOnly):
    """Predicts the patches that are dropped, in validation as well."""

    def __init__(self):
        super().__init__()
        self.drop, self.embed = DropPatches(), nn.Linear(4, 32)
        self.place = nn.Parameter(torch.randn(16, 32) * 0.02)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True), 1)

    def network(self):
        return nn.Linear(32, 4)

    def loss(self, x, y):
        patches = F.unfold(x, 2, stride=2).transpose(1, 2)
        shown, dropped = self.drop(patches)
        error = (self(self.body(self.embed(shown) + self.place)) - patches).square().mean(-1)
        return (error * dropped).sum() / dropped.sum()


@no_bug()
def dropped_patches_are_what_is_predicted():
    return Hidden(), *digits(batch=64)


@no_bug()
def each_epoch_begins_with_the_average():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.ema = copy.deepcopy(self.net).requires_grad_(False)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            with torch.no_grad():
                for average, p in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                    average.lerp_(p, 0.05)

        def on_train_epoch_end(self):
            self.net.load_state_dict(self.ema.state_dict())

        def validation_step(self, batch, batch_idx):
            self.log("val/acc", (self.ema(batch[0]).argmax(1) == batch[1]).float().mean())

    return Net(), *digits()


@no_bug()
def margin_of_few_samples_is_negative():
    class Net(Base):
        def __init__(self, margin=-0.2, scale=20.0):
            super().__init__()
            self.margin, self.scale = margin, scale
            self.weight = nn.Parameter(torch.randn(10, 32) * 0.1)

        def network(self):
            return mlp(outputs=32)

        def forward(self, x):
            return F.linear(F.normalize(self.net(x), dim=1), F.normalize(self.weight, dim=1))

        def loss(self, x, y):
            return F.cross_entropy(self.scale * (self(x) - self.margin * F.one_hot(y, 10)), y)

    return Net(), *digits()


@no_bug()
def points_are_drawn_within_an_interval():
    class Net(LossOnly):
        def network(self):
            return two_layers(8, 8)

        def forward(self, x):
            low, width = self.net(x).chunk(2, dim=1)
            return low, F.softplus(width)

        def loss(self, x, y):
            low, width = self(x)
            point = low + width * torch.rand_like(width)
            return F.mse_loss(point, y) - 0.1 * width.log().mean()

        def validation_step(self, batch, batch_idx):
            low, width = self(batch[0])
            self.log("val/coverage", ((batch[1] >= low) & (batch[1] <= low + width)).float().mean())

    x = normals(800, 8)
    return Net(), *halves(x, x[:, :4] * x[:, 4:] + 0.2 * normals(800, 4, seed=1), split=600)
