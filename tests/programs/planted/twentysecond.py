"""Validations that compute something else than training, and more that was missed at first."""

import lightning as L
import torch
from programs import bug, halves, mlp, tokens
from programs.planted.tenth import Prototypes
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset


class Drawn(IterableDataset):
    """Episodes of five classes: a support, and queries, which are drawn anew if not ``apart``."""

    def __init__(self, queries, count, seed, *, apart):
        self.queries, self.count, self.seed, self.apart = queries, count, seed, apart
        g = torch.Generator().manual_seed(seed)
        self.bank = torch.randn(20, 1, 16, generator=g) + 0.5 * torch.randn(20, 12, 16, generator=g)

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        for _ in range(self.count):
            support, query = [], []
            for c in torch.randperm(20, generator=g)[:5]:
                first = torch.randperm(12, generator=g)
                then = first[4:] if self.apart else torch.randperm(12, generator=g)
                support.append(self.bank[c, first[:4]])
                query.append(self.bank[c, then[: self.queries]])
            yield torch.stack(support), torch.stack(query)


def episodes(*, apart):
    """Of as many queries as the support has in training, and of more in validation."""
    return tuple(DataLoader(Drawn(*args, apart=apart), 4) for args in ((4, 160, 0), (8, 32, 1)))


@bug("shared-rows")
def query_of_a_validation_is_in_its_support():
    return Prototypes(), *episodes(apart=False)


def joined(rows):
    """Words and tags (N, T), and which of them are there."""
    words, tags = zip(*rows, strict=True)
    there = [torch.ones(len(w), dtype=torch.bool) for w in words]
    return tuple(pad_sequence(list(part), batch_first=True) for part in (words, tags, there))


class Tagger(L.LightningModule):
    """Tags of words of sentences of differing lengths."""

    def __init__(self):
        super().__init__()
        self.embed, self.net = nn.Embedding(20, 16, padding_idx=0), nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 3)
        self.right = self.total = 0

    def forward(self, words):
        return self.head(self.net(self.embed(words))[0])

    def training_step(self, batch, batch_idx):
        words, tags, there = batch
        losses = F.cross_entropy(self(words).transpose(1, 2), tags, reduction="none")
        return (losses * there).sum() / there.sum()

    def counted(self, right, there):
        return right.flatten()

    def validation_step(self, batch, batch_idx):
        words, tags, there = batch
        right = self.counted(self(words).argmax(-1) == tags, there)
        self.right += int(right.sum())
        self.total += len(right)

    def on_validation_epoch_end(self):
        self.log("val/token_acc", self.right / self.total)
        self.right = self.total = 0

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def sentences():
    g = torch.Generator().manual_seed(0)
    words = [torch.randint(1, 20, (int(n),), generator=g) for n in torch.randint(2, 12, (480,), generator=g)]
    data = [(w, (w + w.roll(1)) % 3) for w in words]
    train = DataLoader(data[:320], 32, shuffle=True, collate_fn=joined)
    return train, DataLoader(data[320:], 32, collate_fn=joined)


@bug("averaged-metric")
def accuracy_counts_what_fills_sentences():
    return Tagger(), *sentences()


class Decoder(L.LightningModule):
    """Continues sequences of four tokens, one token at a time, with keys and values of those before."""

    def __init__(self):
        super().__init__()
        self.embed, self.net, self.head = nn.Embedding(12, 32), nn.Embedding(16, 32), nn.Linear(32, 12)
        self.attention = nn.Linear(32, 96)

    def places(self, count, before):
        return torch.arange(before, before + count)

    def forward(self, tokens, kept=None):
        before = 0 if kept is None else kept[0].shape[1]
        x = self.embed(tokens) + self.net(self.places(tokens.shape[1], before))
        q, k, v = self.attention(x).chunk(3, dim=-1)
        if kept is not None:
            k, v = torch.cat([kept[0], k], 1), torch.cat([kept[1], v], 1)
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=kept is None)), (k, v)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[:, :-1])[0].transpose(1, 2), batch[:, 1:])

    def continued(self, start, count):
        out, kept = self(start)
        found = [out[:, -1:].argmax(-1)]
        while len(found) < count:
            out, kept = self(found[-1], kept)
            found.append(out[:, -1:].argmax(-1))
        return torch.cat(found, 1)

    def validation_step(self, batch, batch_idx):
        self.log("val/token_acc", (self.continued(batch[:, :4], 12) == batch[:, 4:]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


@bug("cached-position")
def each_token_is_the_first():
    class Net(Decoder):
        def places(self, count, before):
            return torch.arange(count)

    return Net(), *halves(tokens())


class Diffusion(L.LightningModule):
    """Predicts the noise of points at a share of the steps, and samples from the last step to the first."""

    steps = 20

    def __init__(self):
        super().__init__()
        self.net = mlp(3, 32, 2)
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-2, 0.3, self.steps), 0))

    def noise(self, x, t):
        return self.net(torch.cat([x, t[:, None]], 1))

    def training_step(self, batch, batch_idx):
        t = torch.randint(self.steps, (len(batch),))
        kept, noise = self.kept[t][:, None], torch.randn_like(batch)
        return F.mse_loss(self.noise(kept.sqrt() * batch + (1 - kept).sqrt() * noise, t / self.steps), noise)

    def share(self, i):
        return i / self.steps

    def validation_step(self, batch, batch_idx):
        x = torch.randn_like(batch)
        for i in reversed(range(self.steps)):
            noise = self.noise(x, torch.full((len(x),), float(self.share(i))))
            before = self.kept[i - 1] if i else torch.ones(())
            x = before.sqrt() * (x - (1 - self.kept[i]).sqrt() * noise) / self.kept[i].sqrt()
            x = x + (1 - before).sqrt() * noise
        self.log("val/distance", torch.cdist(x, batch).min(1).values.mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def points():
    g = torch.Generator().manual_seed(0)
    angle = torch.rand(640, generator=g) * 6.28
    return halves(torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(640, 2, generator=g))


@bug("validation-scale")
def sampler_passes_the_number_of_the_step():
    class Net(Diffusion):
        def share(self, i):
            return i

    return Net(), *points()


class Cart(L.LightningModule):
    """Imitates a controller of a place in millimeters, a speed and an angle, which are standardized."""

    def __init__(self):
        super().__init__()
        self.net = mlp(3, 32, 1)
        self.register_buffer("mean", torch.tensor([20.0, 1.0, -0.1]))
        self.register_buffer("deviation", torch.tensor([80.0, 0.5, 0.1]))

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self.net(x)[:, 0], y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))

    def scaled(self, x):
        return (x - self.mean) / self.deviation

    def start(self):
        return self.mean + self.deviation * torch.randn(40, 3)

    def on_validation_epoch_end(self):
        x = self.start()
        for _ in range(20):
            force = self.net(self.scaled(x))
            x = x * 0.9 + force * torch.tensor([2.0, 0.05, 0.01])
        self.log("val/place", x[:, 0].abs().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def demonstrations():
    x = torch.randn(640, 3, generator=torch.Generator().manual_seed(0))
    return halves(x, -x.sum(1).clamp(-2, 2))


@bug("validation-scale")
def controller_gets_what_is_not_standardized():
    class Net(Cart):
        def scaled(self, x):
            return x

    return Net(), *demonstrations()


def choices(users=120, items=100):
    """Items that users have chosen: some for training, and three others."""
    g = torch.Generator().manual_seed(0)
    taste = torch.randn(users, 4, generator=g) @ torch.randn(4, items, generator=g)
    chosen = (taste + 0.5 * torch.randn(users, items, generator=g)).topk(19).indices
    chosen = torch.stack([row[torch.randperm(19, generator=g)] for row in chosen])
    return chosen[:, :16], chosen[:, 16:]


class Chosen(Dataset):
    """A user, one of its items, and an item that it has not."""

    def __init__(self, known):
        self.known = known

    def __len__(self):
        return self.known.numel()

    def __getitem__(self, i):
        user, n = divmod(i, self.known.shape[1])
        other = int(torch.randint(100, (1,)))
        while other in self.known[user]:
            other = int(torch.randint(100, (1,)))
        return user, int(self.known[user, n]), other


class Recommender(L.LightningModule):
    """Ranks items by the product of a user's vector and an item's."""

    def __init__(self):
        super().__init__()
        self.net, self.items = nn.Embedding(120, 8), nn.Embedding(100, 8)
        self.register_buffer("known", torch.zeros(120, 100, dtype=torch.bool).scatter(1, choices()[0], True))

    def training_step(self, batch, batch_idx):
        user, item, other = batch
        return -F.logsigmoid((self.net(user) * (self.items(item) - self.items(other))).sum(1)).mean()

    def best(self, user, scores):
        return scores.topk(10).indices

    def validation_step(self, batch, batch_idx):
        user, wanted = batch
        best = self.best(user, self.net(user) @ self.items.weight.T)
        self.log("val/recall", (wanted[:, :, None] == best[:, None]).any(2).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def users():
    known, wanted = choices()
    return DataLoader(Chosen(known), 64, shuffle=True), DataLoader(TensorDataset(torch.arange(120), wanted), 120)


@bug("seen-items")
def known_items_are_ranked():
    return Recommender(), *users()
