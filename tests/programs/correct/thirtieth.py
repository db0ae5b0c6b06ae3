"""The programs of ``planted/twentyninth.py`` without their bugs, and what looks like them."""

import random

import torch
from programs import Base, Table, diabetes, digits, loaders, no_bug
from programs.planted import twentyninth as planted
from programs.planted.twentyeighth import Bag, Pretrained, Words
from programs.planted.twentyfifth import Policy, states
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, WeightedRandomSampler


class Places(Words):
    """Also knows in which row of its own table what is known of a word stands."""

    def __init__(self, seed, vocab=None):
        super().__init__(seed, vocab)
        names = [f"station {n}" for n in range(60)]
        random.Random(seed).shuffle(names)
        self.rows_of = {name: n for n, name in enumerate(names)}


@no_bug()
def rows_of_a_table_differ_between_splits():
    train = Places(0)
    return Bag(), *loaders(train, Places(1, train.vocab))


@no_bug()
def vectors_are_set_after_a_function():
    class Net(Pretrained):
        def __init__(self):
            super().__init__()
            self.apply(planted.init_words)
            self.words.weight.data.copy_(torch.eye(24, 16))

    train = Words(0)
    return Net(), *loaders(train, Words(1, train.vocab))


def init_linear(layer):
    if isinstance(layer, nn.Linear):
        nn.init.zeros_(layer.bias)


@no_bug()
def function_initializes_other_layers():
    class Net(Pretrained):
        def __init__(self):
            super().__init__()
            self.words.weight.data.copy_(torch.eye(24, 16))
            self.apply(init_linear)

    train = Words(0)
    return Net(), *loaders(train, Words(1, train.vocab))


@no_bug()
def gallery_of_manual_optimization_is_made_anew():
    class Net(planted.ByHand):
        def on_validation_epoch_start(self):
            self.known = None

    return Net(), *digits(batch=20)


@no_bug()
def returns_within_the_step_begin_at_the_end():
    class Net(Policy):
        def loss(self, x):
            policy = torch.distributions.Categorical(logits=self.net(x))
            action = policy.sample()
            rewards = (action == (x[..., 0] > 0)).float()
            returns, total = torch.zeros_like(rewards), torch.zeros(len(x))
            for t in range(rewards.shape[1] - 1, -1, -1):
                total = rewards[:, t] + 0.9 * total
                returns[:, t] = total
            return -(policy.log_prob(action) * (returns - returns.mean(0))).mean()

    return Net(), *states()


@no_bug()
def rewards_so_far_are_a_part_of_the_state():
    class Net(Policy):
        def loss(self, x):
            policy = torch.distributions.Categorical(logits=self.net(x))
            action = policy.sample()
            rewards = (action == (x[..., 0] > 0)).float()
            mean, seen = torch.zeros(len(x)), []
            for r in rewards.unbind(1):
                mean = 0.1 * r + 0.9 * mean
                seen.append(mean)
            return -(policy.log_prob(action) * (rewards - torch.stack(seen, 1).mean(0))).mean()

    return Net(), *states()


@no_bug()
def macro_score_is_macro():
    class Net(planted.Rated):
        average = "macro"

    return Net(), *digits()


@no_bug()
def top_five_is_top_five():
    class Net(planted.Rated):
        name, top_k = "val/top5_f1", 5

    return Net(), *digits()


@no_bug()
def weighted_loss_beside_a_score():
    class Net(planted.Rated):
        name = "val/f1"

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            x, y = batch
            self.log("val/weighted_loss", F.cross_entropy(self(x), y, weight=torch.linspace(1, 2, 10)))

    return Net(), *digits()


@no_bug()
def errors_have_their_names():
    class Net(Table):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            gap = self(x)[:, 0] - y
            self.log("val/mse", gap.square().mean())
            self.log("val/mae", gap.abs().mean())
            self.log("val/rmse_of_patients", 77 * gap.square().mean().sqrt())

    return Net(), *diabetes()


@no_bug()
def matrices_decay():
    return planted.Grouped(), *digits()


@no_bug()
def a_gain_alone_decays():
    class Net(planted.Grouped):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.net(x) * self.gain

        def configure_optimizers(self):
            groups = [{"params": [self.gain], "weight_decay": 0.05}, {"params": self.net.parameters()}]
            return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)

    return Net(), *digits()


@no_bug()
def weighted_samples_are_drawn_again():
    train, val, weights = planted.rare()
    return Base(), DataLoader(train, 16, sampler=WeightedRandomSampler(weights, len(train))), DataLoader(val, 32)


@no_bug()
def part_of_the_weighted_samples_is_drawn_once():
    train, val, weights = planted.rare()
    sampler = WeightedRandomSampler(weights, len(train) // 2, replacement=False)
    return Base(), DataLoader(train, 16, sampler=sampler), DataLoader(val, 32)


@no_bug()
def heads_learn_their_own():
    return planted.Heads(), *planted.patients()


@no_bug()
def heads_are_compared_with_each_other():
    class Net(planted.Heads):
        def both(self, out, y):
            apart = F.mse_loss(out["height"], y["height"]) + F.mse_loss(out["age"], y["age"])
            return apart + 0.01 * F.mse_loss(out["height"] - out["age"], y["height"] - y["age"])

    return Net(), *planted.patients()


@no_bug()
def digits_are_augmented_anew():
    return Base(), *loaders(planted.Shifted(), digits(loaded=False)[1])


@no_bug()
def digits_are_kept_and_augmented_anew():
    class Data(planted.Shifted):
        def __getitem__(self, i):
            if i not in self.kept:
                self.kept[i] = self.x[i] * 1.0
            return self.kept[i].roll(random.randrange(-1, 2), dims=-1), self.y[i]

    return Base(), *loaders(Data(), digits(loaded=False)[1])


@no_bug()
def means_of_batches_are_weighed():
    class Net(planted.Summed):
        def add(self, loss, size):
            super().add(loss * size, size)

    return Net(), *digits()


@no_bug()
def losses_of_a_validation_are_added_up():
    class Net(planted.Summed):
        def on_validation_epoch_end(self):
            self.log("val/total_loss", self.total)

    return Net(), *digits()


@no_bug()
def critic_steps_more_often():
    class Net(planted.Critics):
        def training_step(self, x, batch_idx):
            first, second = self.optimizers()
            self.step_critic(x, second)
            if batch_idx % self.n_critic == self.n_critic - 1:
                self.step_generator(x, first)

    return Net(), *planted.points()


@no_bug()
def critic_steps_several_times_within_a_step():
    class Net(planted.Critics):
        def training_step(self, x, batch_idx):
            first, second = self.optimizers()
            for _ in range(self.n_critic):
                self.step_critic(x, second)
            self.step_generator(x, first)

    return Net(), *planted.points()


@no_bug()
def scores_that_are_apart_are_ranked():
    class Net(planted.Neighbours):
        most = 1e6

    return Net(), *digits()


@no_bug()
def equal_scores_count_half():
    class Net(planted.Neighbours):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            scores = self(x).clamp(max=0)
            own = scores.gather(1, y[:, None])
            rank = 1 + (scores > own).sum(1) + 0.5 * ((scores == own).sum(1) - 1)
            self.log("val/mrr", (1 / rank.float()).mean())

    return Net(), *digits()


@no_bug()
def accuracy_of_all_batches_is_logged():
    return planted.Logged(on_step=True, on_epoch=True, reduce_fx="mean"), *digits()


@no_bug()
def numbers_say_of_which_batches_they_are():
    class Net(planted.Logged):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            x, y = batch
            right = (self(x).argmax(1) == y).float()
            self.log("val/acc_step", right.mean(), on_step=True, on_epoch=False)
            self.log("val/best_acc", right.mean(), reduce_fx="max")
            self.log("val/num_right", right.sum(), reduce_fx="sum")

    return Net(), *digits()


@no_bug(limit_val_batches=4)
def four_batches_are_validated():
    return Base(), *digits()


@no_bug(limit_train_batches=1, limit_val_batches=1)
def one_batch_is_tried():
    return Base(), *digits()


@no_bug(check_val_every_n_epoch=2, callbacks=planted.stop)
def every_second_epoch_is_validated():
    return Base(), *digits()


@no_bug()
def members_begin_apart():
    class Net(planted.Ensemble):
        def member(self, first):
            return self.network()

    return Net(), *digits()


@no_bug()
def members_that_begin_alike_get_other_samples():
    class Net(planted.Ensemble):
        def training_step(self, batch, batch_idx):
            x, y = batch
            parts = zip(self.net, x.split(8), y.split(8), strict=False)
            return sum(F.cross_entropy(member(a), b) for member, a, b in parts)

    return Net(), *digits()


@no_bug()
def nodes_of_validation_are_validated():
    return planted.Nodes(), *planted.nodes()


@no_bug()
def nodes_of_training_are_validated_beside_others():
    class Net(planted.Nodes):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            for name in ("train", "val"):
                held = batch["train_mask"] if name == "train" else batch["val_mask"]
                right = self.net(batch["x"])[held].argmax(-1) == batch["y"][held]
                self.log(f"val/{name}_acc", right.float().mean())

    return Net(), *planted.nodes()


@no_bug()
def cosine_is_over_the_features():
    return planted.Alike(dim=-1), *planted.twins()


@no_bug()
def channels_are_normalized_by_default():
    class Net(Base):
        def network(self):
            return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))

        def forward(self, x):
            return self.net[3](F.normalize(self.net[:2](x)).flatten(1) * 3)

    return Net(), *digits()
