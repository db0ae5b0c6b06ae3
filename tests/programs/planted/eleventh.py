"""Common mistakes that a writer who had seen no check made, and that no check named."""

import copy

import torch
from programs import Base, LossOnly, bug, halves, loaders, mlp, sequences
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Pooled(Base):
    """Attention gives each time of a series a weight."""

    dim = 1

    def __init__(self):
        super().__init__()
        self.score, self.net = nn.Linear(5, 1), nn.Linear(5, 4)

    def forward(self, x):
        weights = self.score(x).softmax(self.dim)
        return self.net((weights * x).sum(1))


@bug("softmax-of-one")
def attention_weights_are_one():
    class M(Pooled):
        dim = 2

    return M(), *halves(*sequences())


class Transitions(LossOnly):
    """Learns values of states from transitions, in a method to which the step passes its batch."""

    ends = True

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def error(self, batch):
        state, action, reward, following, done = batch
        value = self.net(state).gather(1, action[:, None])[:, 0]
        with torch.no_grad():
            ahead = self.target(following).amax(1)
            expected = reward + 0.9 * ahead * (1 - done if self.ends else 1)
        return F.smooth_l1_loss(value, expected)

    def training_step(self, batch, batch_idx):
        return self.error(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.error(batch))

    def on_train_batch_end(self, *args):
        if self.global_step % 5 == 0:
            self.target.load_state_dict(self.net.state_dict())


def transitions(count=640):
    g = torch.Generator().manual_seed(0)
    state, following = torch.randn(count, 4, generator=g), torch.randn(count, 4, generator=g)
    done = (torch.rand(count, generator=g) < 0.2).float()
    return halves(state, torch.randint(0, 3, (count,), generator=g), done * state[:, 0], following, done)


@bug("unused-part")
def end_of_episode_ignored_in_a_method():
    class M(Transitions):
        ends = False

    return M(), *transitions()


def rare_rows(count=600):
    g = torch.Generator().manual_seed(0)
    return torch.randn(count, 20, generator=g), (torch.rand(count, generator=g) < 0.1).long()


def with_copies(x, y):
    """As many rows of the rare class as of the other."""
    g = torch.Generator().manual_seed(1)
    rare = y.nonzero()[:, 0]
    chosen = rare[torch.randint(0, len(rare), (len(y) - 2 * len(rare),), generator=g)]
    order = torch.randperm(len(y) + len(chosen), generator=g)
    return torch.cat([x, x[chosen]])[order], torch.cat([y, y[chosen]])[order]


class Rare(LossOnly):
    def network(self):
        return mlp(20, 32, 2)


@bug("overlap")
def rare_class_is_copied_to_balance_before_the_split():
    return Rare(), *halves(*with_copies(*rare_rows()), split=840)


class Pictures(Dataset):
    """Colored bars as height, width and channels, as other libraries read them."""

    moves = False

    def __init__(self, seed, count=320):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 6, (count,), generator=g)
        self.x = torch.randint(0, 120, (count, 8, 8, 3), generator=g, dtype=torch.uint8)
        for x, y in zip(self.x, self.y, strict=True):
            x[(slice(None), 3, int(y) % 3) if y < 3 else (3, slice(None), int(y) % 3)] = 230

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        x = self.x[index].float() / 255
        return x.permute(2, 0, 1) if self.moves else x.view(3, 8, 8), self.y[index]


class Colors(LossOnly):
    def network(self):
        layers = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(16, 6))


@bug("reshape-not-transpose")
def picture_viewed_in_the_dataset():
    return Colors(), *loaders(Pictures(0), Pictures(1))


class Views(Dataset):
    """Two noisy views of each sample."""

    def __init__(self, draws_anew, count=320, first=0):
        self.draws_anew = draws_anew
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(first)) @ torch.randn(
            4, 32, generator=torch.Generator().manual_seed(1)
        )

    def __len__(self):
        return len(self.x)

    def view(self, index, seed):
        return self.x[index] + torch.randn(32, generator=torch.Generator().manual_seed(seed))

    def __getitem__(self, index):
        return self.view(index, 2 * index), self.view(index, 2 * index + self.draws_anew)


class Contrast(LossOnly):
    joins = False

    def network(self):
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))

    def loss(self, one, other):
        if self.joins:
            a, b = F.normalize(self(torch.cat([one, other])), dim=1).chunk(2)
        else:
            a, b = F.normalize(self(one), dim=1), F.normalize(self(other), dim=1)
        return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a), device=a.device))


@bug("same-views")
def views_with_one_seed():
    return Contrast(), *loaders(Views(False), Views(False, first=1000))


@bug("same-views")
def views_with_one_seed_in_one_pass():
    class M(Contrast):
        joins = True

    return M(), *loaders(Views(False), Views(False, first=1000))


class Sentences(Dataset):
    """Words, and the tag of each; 0 is padding of words, and a tag."""

    pads_tags = 0

    def __init__(self, seed, count=320):
        g = torch.Generator().manual_seed(seed)
        sizes = torch.randint(3, 13, (count,), generator=g).tolist()
        self.tags = [torch.randint(0, 4, (size,), generator=g) for size in sizes]
        self.words = [1 + 5 * tag + torch.randint(0, 5, tag.shape, generator=g) for tag in self.tags]

    def __len__(self):
        return len(self.tags)

    def __getitem__(self, index):
        return self.words[index], self.tags[index]

    def collate(self, samples):
        pads = zip((0, self.pads_tags), zip(*samples, strict=True), strict=True)
        return [nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=pad) for pad, each in pads]


def sentences(kind):
    return [DataLoader(data, 32, collate_fn=data.collate) for data in (kind(0), kind(1))]


class Tagger(LossOnly):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.net = nn.Embedding(21, 16, padding_idx=0), nn.GRU(16, 16), nn.Linear(16, 4)

    def loss(self, words, tags):
        hidden, _ = self.body(self.embed(words).transpose(0, 1))
        return F.cross_entropy(self.net(hidden.transpose(0, 1)).transpose(1, 2), tags)


@bug("padding-in-loss")
def padding_is_a_tag():
    return Tagger(), *sentences(Sentences)


class Lengths(Sentences):
    def collate(self, samples):
        words, tags = zip(*samples, strict=True)
        lengths = torch.tensor([len(each) for each in words])
        return nn.utils.rnn.pad_sequence(words, batch_first=True), lengths, torch.stack([each[0] for each in tags])


class Averaged(LossOnly):
    """The class of the first word, by the mean of all words."""

    masks = False

    def __init__(self):
        super().__init__()
        self.embed, self.net = nn.Embedding(21, 16), nn.Linear(16, 4)

    def forward(self, words, lengths):
        vectors = self.embed(words)
        if self.masks:
            valid = torch.arange(words.shape[1], device=words.device) < lengths[:, None]
            return self.net((vectors * valid[..., None]).sum(1) / lengths[:, None])
        return self.net(vectors.mean(1))

    def loss(self, words, lengths, y):
        return F.cross_entropy(self(words, lengths), y)

    def training_step(self, batch, batch_idx):
        words, lengths, y = batch
        return self.loss(words, lengths, y)


@bug("masked-matters")
def lengths_are_never_read():
    return Averaged(), *sentences(Lengths)


class Graphs(Dataset):
    """Rings of 4 to 7 nodes, whose target is the sum of products of neighbors."""

    shifts = True

    def __init__(self, seed, count=320):
        g = torch.Generator().manual_seed(seed)
        self.nodes = [torch.randn(int(size), 3, generator=g) for size in torch.randint(4, 8, (count,), generator=g)]

    def __len__(self):
        return len(self.nodes)

    def __getitem__(self, index):
        nodes = self.nodes[index]
        edges = torch.stack([torch.arange(len(nodes)), torch.arange(len(nodes)).roll(1)])
        return nodes, edges, (nodes[edges[0], 0] * nodes[edges[1], 0]).sum()

    def collate(self, samples):
        nodes, edges, y = zip(*samples, strict=True)
        sizes = torch.tensor([len(each) for each in nodes])
        starts = sizes.cumsum(0) - sizes
        if self.shifts:
            edges = [each + start for each, start in zip(edges, starts, strict=True)]
        owners = torch.arange(len(nodes)).repeat_interleave(sizes)
        return torch.cat(nodes), torch.cat(edges, 1), owners, torch.stack(y)


class OfGraphs(LossOnly):
    def network(self):
        return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))

    def loss(self, nodes, edges, owners, y):
        messages = self.net(torch.cat([nodes[edges[0]], nodes[edges[1]]], 1))[:, 0]
        return F.mse_loss(torch.zeros_like(y).index_add(0, owners[edges[1]], messages), y)


@bug("edges-not-shifted")
def edges_of_all_graphs_are_those_of_the_first():
    class Data(Graphs):
        shifts = False

    return OfGraphs(), *sentences(Data)
