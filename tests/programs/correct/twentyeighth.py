"""The programs of ``planted/twentyseventh.py`` without their bugs, and what looks like them."""

import lightning as L
import torch
from programs import Base, LossOnly, Manual, digits, halves, no_bug, tokens
from programs.planted.twentyseventh import Averaged, Coded, Continued, Doubles, Lined, Ring, Waves, ring, tiles, waves
from torch import nn
from torch.nn import functional as F


@no_bug()
def ring_of_two_optimizers():
    return Ring(), *ring()


@no_bug()
def critic_is_frozen_while_its_generator_is_trained():
    class Net(Ring):
        def of_generator(self):
            return self.parameters()

        def generate(self, optimizer, count):
            self.critic.requires_grad_(False)
            super().generate(optimizer, count)
            self.critic.requires_grad_(True)

    return Net(), *ring()


class Restored(Averaged):
    """Restores the trained weights."""

    @torch.no_grad()
    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            for n, p in pl_module.named_parameters():
                p.copy_(self.trained[n])


@no_bug(callbacks=lambda: [Restored()])
def trained_weights_are_restored_after_validation():
    return Base(), *digits()


class Late(Averaged):
    """Restores them when the next epoch begins."""

    def on_train_epoch_start(self, trainer, pl_module):
        if hasattr(self, "trained"):
            pl_module.load_state_dict(self.trained)


@no_bug(callbacks=lambda: [Late()])
def trained_weights_are_restored_when_an_epoch_begins():
    return Base(), *digits()


class FreeOfSchedules(torch.optim.SGD):
    """Validates the average of its weights, as schedule-free optimizers do by eval() and train()."""

    @torch.no_grad()
    def exchange(self, *, averaged):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if averaged and "trained" not in state:
                    state["trained"] = p.clone()
                    p.lerp_(state.setdefault("average", p.clone()), 0.5)
                elif not averaged and "trained" in state:
                    p.copy_(state.pop("trained"))


@no_bug()
def optimizer_is_exchanged_by_hooks_of_modes():
    class Net(Base):
        def on_validation_model_eval(self):
            super().on_validation_model_eval()
            self.optimizers().optimizer.exchange(averaged=True)

        def on_validation_model_train(self):
            super().on_validation_model_train()
            self.optimizers().optimizer.exchange(averaged=False)

        def configure_optimizers(self):
            return FreeOfSchedules(self.parameters(), 0.1)

    return Net(), *digits()


class Times(L.Callback):
    """Measures the samples per second, without the first batches."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx < self.warmup:
            return
        self.count += len(batch[0])

    warmup, count = 4, 0


@no_bug(callbacks=lambda: [Times()])
def speed_is_measured_behind_a_warm_up():
    return Base(), *digits()


@no_bug()
def critic_makes_three_steps_for_one():
    class Net(Ring):
        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            real = batch[0]
            second.zero_grad()
            fake = self.net(torch.randn(len(real), 4))
            self.manual_backward(self.score(real, is_real=True) + self.score(fake, is_real=False))
            second.step()
            if batch_idx % 3 == 0:
                self.generate(first, len(real))

    return Net(), *ring()


class TwoHeads(Manual):
    """A classifier and a decoder of one encoder, with three optimizers; two of them train the encoder."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.head, self.decoder = nn.Linear(32, 10), nn.Linear(32, 64)

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, encoder, decoder = self.optimizers()
        first.zero_grad()
        self.manual_backward(F.cross_entropy(self.head(self.net(x)), y))
        first.step()
        encoder.zero_grad()
        decoder.zero_grad()
        self.manual_backward(F.mse_loss(self.decoder(self.net(x)), x.flatten(1)))
        encoder.step()
        decoder.step()

    def configure_optimizers(self):
        first = torch.optim.Adam([*self.net.parameters(), *self.head.parameters()], 1e-3)
        others = (torch.optim.Adam(part.parameters(), 1e-3) for part in (self.net, self.decoder))
        return first, *others


@no_bug()
def encoder_is_trained_by_two_optimizers():
    return TwoHeads(), *digits()


class Inner(Manual):
    """The head makes three steps of its own, and then all make one."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        inner, outer = self.optimizers()
        for _ in range(3):
            inner.zero_grad()
            self.manual_backward(F.cross_entropy(self(x), y))
            inner.step()
        outer.zero_grad()
        self.manual_backward(F.cross_entropy(self(x), y))
        outer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[-1].parameters(), 0.1), torch.optim.Adam(self.parameters(), 1e-3)


@no_bug()
def head_makes_steps_of_its_own():
    return Inner(), *digits()


class Phases(Manual):
    """The head alone in even batches, and all in the others."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[-1].parameters(), 0.1), torch.optim.Adam(self.parameters(), 1e-3)


@no_bug()
def head_and_all_take_turns():
    return Phases(), *digits()


class Protocol(L.Callback):
    """Calls hooks of its own."""

    def on_train_epoch_start(self, trainer, pl_module):
        self.on_epoch_begin(trainer.current_epoch)

    def on_epoch_begin(self, epoch):
        pass


class Follows(Protocol):
    """Has such a hook."""

    def __init__(self):
        self.epochs = []

    def on_epoch_begin(self, epoch):
        self.epochs.append(epoch)


class Tells(Base):
    """Calls a hook of its callbacks."""

    def on_train_start(self):
        for each in self.trainer.callbacks:
            if hasattr(each, "on_train_begin"):
                each.on_train_begin(self)


class Listens(L.Callback):
    """Is told by the module."""

    def on_train_begin(self, module):
        self.started = True


@no_bug(callbacks=lambda: [Follows(), Listens()])
def callbacks_with_hooks_of_their_own():
    return Tells(), *digits()


@no_bug()
def data_module_scales_what_is_on_the_device():
    class Data(Doubles):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return self.on_after_batch_transferred(batch, dataloader_idx)

    return Base(), Data(), None


@no_bug()
def warm_up_counts_steps():
    class Net(Base):
        def on_train_batch_start(self, batch, batch_idx):
            step = self.trainer.global_step + 1
            for group in self.optimizers().param_groups:
                group["lr"] = self.lr * min(1.0, step / 30)

    return Net(), *digits()


@no_bug()
def warm_up_within_the_first_epoch():
    class Net(Base):
        def on_train_batch_start(self, batch, batch_idx):
            factor = min(1.0, (batch_idx + 1) / 15) if self.current_epoch == 0 else 1.0
            for group in self.optimizers().param_groups:
                group["lr"] = self.lr * factor

    return Net(), *digits()


@no_bug()
def progress_of_an_epoch_is_logged():
    class Net(Base):
        def training_step(self, batch, batch_idx):
            self.log("train/progress", min(1.0, (batch_idx + 1) / 20))
            if batch_idx < 2:
                self.log("train/first", 1.0)
            return super().training_step(batch, batch_idx)

    return Net(), *digits()


@no_bug()
def weight_of_the_divergence_counts_steps():
    class Net(Coded):
        def weight(self, batch_idx):
            return min(1.0, self.global_step / 50)

    return Net(), *digits()


@no_bug()
def pictures_of_few_colors():
    x, y = tiles()
    return Lined(), *halves(x.permute(0, 3, 1, 2), y)


@no_bug()
def pictures_of_gray():
    x, y = tiles()
    return Lined(), *halves(x.mean(3)[:, None].repeat(1, 3, 1, 1), y)


@no_bug()
def series_of_channels():
    x, y = waves()
    return Waves(), *halves(x.transpose(1, 2), y)


@no_bug()
def series_of_times():
    class Net(Waves):
        def forward(self, x):
            return self.net(x.transpose(1, 2))

    x, y = waves()
    return Net(), *halves(x, y)


@no_bug()
def days_of_hours():
    class Net(Waves):
        def network(self):
            return nn.Sequential(
                nn.Conv1d(6, 16, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 3)
            )

    g = torch.Generator().manual_seed(1)
    y = torch.randint(0, 3, (640,), generator=g)
    hours = torch.arange(6 * 24)[None]
    x = torch.sin(hours * 6.2832 / 24) * (1 + y[:, None]) + 0.7 * torch.randn(640, 144, generator=g)
    return Net(), *halves(x.reshape(640, 6, 24), y)


@no_bug()
def continues_a_prefix():
    return Continued(), *halves(tokens())


@no_bug()
def generates_from_a_first_token():
    class Net(Continued):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.loss(batch))
            out = batch[:, :1]
            for _ in range(5):
                out = torch.cat([out, self(out)[:, -1].argmax(-1, keepdim=True)], 1)
            self.log("val/right", (out == batch[:, :6]).float().mean())

    return Net(), *halves(tokens())


class Sets(LossOnly):
    """Digits as sets of rows, some of which are empty: all of their scores are masked."""

    def network(self):
        return nn.Linear(8, 10)

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        rows = self.norm(x.reshape(-1, 8, 8))
        mask = (x.reshape(-1, 8, 8).sum(-1) < 1)[:, None].repeat(1, 8, 1)
        mask[x.flatten(1).sum(1) < 19] = True
        scores = (rows @ rows.transpose(1, 2)).masked_fill(mask, float("-inf"))
        return self.net(scores.softmax(-1).nan_to_num(0.0) @ rows + rows).mean(1)


@no_bug()
def weights_of_empty_sets_are_zero():
    return Sets(), *digits()


class Factors(LossOnly):
    """Factors of a matrix of ratings, with a large rate."""

    lr = 0.5

    def network(self):
        return nn.Embedding(30, 8)

    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(20, 8)

    def loss(self, pairs, rating):
        return F.mse_loss((self.net(pairs[:, 0]) * self.items(pairs[:, 1])).mean(1), rating)


@no_bug()
def factors_with_a_large_rate():
    g = torch.Generator().manual_seed(0)
    pairs = torch.stack([torch.randint(0, n, (1280,), generator=g) for n in (30, 20)], 1)
    users, items = torch.randn(30, 3, generator=g), torch.randn(20, 3, generator=g)
    rating = (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1) + 0.1 * torch.randn(1280, generator=g)
    return Factors(), *halves(pairs, rating, split=1000)


class Words(LossOnly):
    """A number of a short text."""

    def network(self):
        return nn.EmbeddingBag(30, 1)

    def loss(self, x, y):
        return F.mse_loss(self(x.long())[:, 0], y)


@no_bug()
def short_texts_recur_by_chance():
    g = torch.Generator().manual_seed(0)
    length, words = torch.randint(1, 5, (768,), generator=g), torch.randint(1, 24, (768, 4), generator=g)
    x = torch.where(torch.arange(4) < length[:, None], words, 0)
    return Words(), *halves(x.float(), x.float().sum(1) / 30, split=640)


@no_bug()
def entropy_of_masked_actions():
    class Net(Base):
        def loss(self, x, y):
            may = F.one_hot(y, 10).bool() | (torch.arange(10) < 5)
            log_p = self(x).masked_fill(~may, float("-inf")).log_softmax(1)
            finite = torch.nan_to_num(log_p, neginf=0.0)
            return F.nll_loss(log_p, y) + 0.01 * (finite.exp() * finite).sum(1).mean()

    return Net(), *digits()


class Drawn(nn.Linear):
    """A layer with noise in its weights, which each pass draws into a buffer."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("eps_weight", torch.zeros(outputs, inputs))

    def forward(self, x):
        self.eps_weight.normal_()
        return F.linear(x, self.weight + 0.05 * self.eps_weight.clone(), self.bias)


@no_bug()
def noise_of_weights_is_a_buffer():
    class Net(Base):
        def network(self):
            return nn.Sequential(nn.Flatten(), Drawn(64, 32), nn.ReLU(), Drawn(32, 10))

    return Net(), *digits()


@no_bug()
def norm_without_trained_scales():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

        def network(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())

        def forward(self, x):
            return self.head(self.norm(self.net(x)))

        def configure_optimizers(self):
            return torch.optim.Adam([*self.net.parameters(), *self.head.parameters()], 1e-2)

    return Net(), *digits()


class Bag(LossOnly):
    """The kind of a set of words, by what stands in the place of a first one."""

    def network(self):
        return nn.Linear(16, 4)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(34, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x):
        return self.net(self.body(self.embed(x), src_key_padding_mask=x == 0)[:, 0])


@no_bug()
def words_in_no_order_behind_a_first_one():
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (960,), generator=g)
    own = 2 + 8 * y[:, None] + torch.randint(0, 8, (960, 20), generator=g)
    x = torch.where(torch.rand(960, 20, generator=g) < 0.5, own, torch.randint(2, 34, (960, 20), generator=g))
    x[torch.arange(20) >= torch.randint(6, 18, (960, 1), generator=g)] = 0
    return Bag(), *halves(torch.cat([torch.ones_like(x[:, :1]), x], 1), y, split=800)


class Headed(nn.Module):
    """A network with a head of its own."""

    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU()), nn.Linear(32, 100)

    def forward(self, x):
        return self.fc(self.body(x))


@no_bug()
def features_are_read_by_a_hook():
    class Net(Base):
        def network(self):
            return nn.Linear(32, 10)

        def __init__(self):
            super().__init__()
            self.backbone = Headed()
            self.backbone.body.register_forward_hook(self.keep)

        def keep(self, part, given, output):
            self.features = output

        def forward(self, x):
            self.backbone(x)
            return self.net(self.features)

    return Net(), *digits()
