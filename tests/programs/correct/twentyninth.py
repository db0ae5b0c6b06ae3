"""The programs of ``planted/twentyeighth.py`` without their bugs, and what looks like them."""

import torch
from programs import Base, Convnet, Table, digits, halves, loaders, no_bug, segments, tokens
from programs.planted import twentyeighth as planted
from programs.planted.twentyeighth import Followed
from torch.nn import functional as F


def returns_up_to_now(rewards, gamma):
    found, total = [], 0.0
    for reward in rewards:
        total = reward + gamma * total
        found.append(total)
    return found


@no_bug()
def target_follows_the_network_by_its_state():
    class Net(Followed):
        def sync(self):
            self.target.load_state_dict(self.net.state_dict())

    return Net(), *digits()


@no_bug()
def target_follows_the_network_by_its_parameters():
    class Net(Followed):
        @torch.no_grad()
        def sync(self):
            for p, q in zip(self.net.parameters(), self.target.parameters(), strict=True):
                q.data.copy_(0.1 * p.data + 0.9 * q.data)

    return Net(), *digits()


@no_bug()
def average_is_validated_in_place_of_the_network():
    class Net(Followed):
        def sync(self):
            self.target.load_state_dict(self.net.state_dict())

        def on_validation_start(self):
            self.kept = {name: value.clone() for name, value in self.net.state_dict().items()}
            self.net.load_state_dict(self.target.state_dict())

        def on_validation_end(self):
            self.net.load_state_dict(self.kept)

    return Net(), *digits()


@no_bug()
def network_begins_as_its_target():
    class Net(Followed):
        def sync(self):
            self.target.load_state_dict(self.net.state_dict())

        def on_train_start(self):
            self.net.load_state_dict(self.target.state_dict())

    return Net(), *digits()


@no_bug()
def both_splits_have_the_numbers_of_training():
    train = planted.Words(0)
    return planted.Bag(), *loaders(train, planted.Words(1, train.vocab))


class Counted(planted.Words):
    """Also counts its words, and knows in which sentence each comes first."""

    def __init__(self, seed, vocab=None):
        super().__init__(seed, vocab)
        self.first, self.counts = {}, {}
        for i, (row, _) in enumerate(self.rows):
            for token in row.tolist():
                self.first.setdefault(token, 10 * i)
                self.counts[token] = self.counts.get(token, 0) + 1


@no_bug()
def words_of_each_split_are_counted():
    train = Counted(0)
    return planted.Bag(), *loaders(train, Counted(1, train.vocab))


@no_bug()
def softmax_over_the_classes_of_places():
    return planted.Marked(), *halves(*segments(), split=240)


@no_bug()
def softmax_over_the_places_of_an_attention():
    class Net(planted.Marked):
        def loss(self, x, y):
            out = self(x)
            weights = out.flatten(2).softmax(-1).reshape(out.shape)
            return F.cross_entropy(out * (0.5 + weights), y)

    return Net(), *halves(*segments(), split=240)


@no_bug(max_epochs=4, accumulate_grad_batches=4)
def schedule_counts_optimizer_steps():
    return planted.Cycled(), *digits()


@no_bug()
def validation_has_a_generator_of_its_own():
    return planted.Noisy(), *digits()


@no_bug()
def validation_restores_the_generator():
    class Net(planted.Noisy):
        def noise(self, x):
            with torch.random.fork_rng():
                torch.manual_seed(7)
                return torch.randn_like(x)

    return Net(), *digits()


@no_bug()
def negative_items_are_drawn_from_items():
    return planted.Ranked(), *planted.choices()


@no_bug()
def gallery_is_embedded_in_each_validation():
    class Net(planted.Gallery):
        def on_validation_epoch_start(self):
            self.known = None

    return Net(), *digits()


@no_bug()
def digits_move_from_where_they_were_at_first():
    class Net(planted.Gallery):
        first_places = None

        def validation_step(self, batch, batch_idx):
            places = self.net[:-1](self.pictures)
            if self.first_places is None:
                self.first_places = places
            self.log("val/moved", (places - self.first_places).norm(dim=1).mean())
            self.log("val/loss", self.loss(*batch))

    return Net(), *digits()


@no_bug()
def gallery_of_a_frozen_network():
    class Net(planted.Gallery):
        def __init__(self):
            super().__init__()
            self.frozen = Convnet().requires_grad_(False).eval()

        def gallery(self):
            if self.known is None:
                self.known = F.normalize(self.frozen(self.pictures), dim=1)
            return self.known

        def validation_step(self, batch, batch_idx):
            x, y = batch
            near = (F.normalize(self.frozen(x), dim=1) @ self.gallery().T).argmax(1)
            self.log("val/near", (self.labels[near] == y).float().mean())
            self.log("val/acc", (self(x).argmax(1) == y).float().mean())

    return Net(), *digits()


@no_bug()
def both_boxes_are_corners():
    return planted.Boxes(), *planted.rectangles()


@no_bug()
def function_returns_a_factor():
    return planted.Warmed(), *digits()


@no_bug()
def vectors_of_views_are_normalized():
    return planted.Views(), *digits()


@no_bug()
def vectors_are_copied_after_the_initialization():
    train = planted.Words(0)
    return planted.Pretrained(), *loaders(train, planted.Words(1, train.vocab))


@no_bug()
def layers_are_initialized_after_words():
    class Net(planted.Pretrained):
        def __init__(self):
            super().__init__()
            self.words.weight.data.copy_(torch.eye(24, 16))
            self.apply(self.begin)

        def begin(self, layer):
            if isinstance(layer, torch.nn.Linear):
                torch.nn.init.xavier_uniform_(layer.weight)

    train = planted.Words(0)
    return Net(), *loaders(train, planted.Words(1, train.vocab))


@no_bug()
def validation_decodes_its_own_tokens():
    return planted.Reversed(), *planted.reversals()


@no_bug()
def rate_knows_of_both_optimizers():
    class Net(planted.Decayed):
        def training_step(self, batch, batch_idx):
            total = 2 * self.trainer.max_epochs * self.trainer.num_training_batches
            factor = max(0.0, 1 - self.global_step / total)
            self.manual_backward(self.loss(*batch))
            for optimizer in self.optimizers():
                for group in optimizer.param_groups:
                    group["lr"] = 0.05 * factor
                optimizer.step()
                optimizer.zero_grad()

    return Net(), *digits()


@no_bug()
def network_returns_to_its_average_if_the_loss_is_no_number():
    class Net(Followed):
        def sync(self):
            self.target.load_state_dict(self.net.state_dict())

        def on_before_zero_grad(self, optimizer):
            if not all(p.isfinite().all() for p in self.net.parameters()):
                self.net.load_state_dict(self.target.state_dict())

    return Net(), *digits()


@no_bug(max_epochs=2)
def schedule_by_total_epochs():
    class Net(planted.Warmed):
        def configure_optimizers(self):
            total_epochs, per_epoch = 2, 20
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 - 0.9 * i / (total_epochs * per_epoch))
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Net(), *digits()


class Played(torch.utils.data.Dataset):
    """Samples whose logarithms of probabilities carry the graph of the network."""

    def __init__(self, net, parts):
        self.net, self.parts = net, parts

    def __len__(self):
        return len(self.parts)

    def __getitem__(self, i):
        x, y = self.parts[i]
        return self.net(x[None]).log_softmax(1)[0], y


@no_bug()
def batch_has_a_graph_of_its_own():
    class Net(Base):
        def loss(self, log_p, y):
            return F.nll_loss(log_p, y)

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.loss(*batch))

    net, parts = Net(), digits(loaded=False)
    return net, *loaders(*(Played(net.net, part) for part in parts))


@no_bug()
def rate_counts_batches():
    return planted.Decayed(), *digits()


@no_bug()
def masked_tokens_are_targets():
    return planted.Masked(), *halves(tokens(), tokens())


@no_bug()
def determinant_of_all_places():
    return planted.Density(), *planted.series()


@no_bug()
def rolling_mean_ends_the_day_before():
    return Table(), *planted.sales(shift=1)


@no_bug()
def speed_of_a_track():
    g = torch.Generator().manual_seed(0)
    speed = torch.randn(680, generator=g)
    place = speed.cumsum(0)
    x = torch.stack([place, place.roll(1), *torch.randn(8, 680, generator=g)], 1)[1:]
    return Table(), *halves((x - x.mean(0)) / x.std(0), speed[1:])


class MinibatchStd(torch.nn.Module):
    """Adds the spread of each feature over the batch, as discriminators do."""

    def forward(self, x):
        return torch.cat([x, x.std(0).mean().expand(len(x), 1)], 1)


@no_bug()
def spread_of_the_batch_is_a_feature():
    class Net(Base):
        def network(self):
            layers = torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU()
            return torch.nn.Sequential(*layers, MinibatchStd(), torch.nn.Linear(33, 10))

    return Net(), *digits()
