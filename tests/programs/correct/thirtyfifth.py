"""The programs of ``thirtythird.py`` of ``planted`` without their bugs, and what is like them."""

import torch
from programs import Base, LossOnly, digits, halves, no_bug
from programs.planted import thirtythird as planted
from programs.planted.ninth import Values
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


@no_bug()
def another_flag_of_steps_has_no_name():
    class M(Values):
        """The last part of the batch tells who has acted; values of ends are none by the discount of each step."""

        def training_step(self, batch, batch_idx):
            state, reward, next_state, discount, _ = batch
            with torch.no_grad():
                target = reward + discount * self(next_state)[:, 0]
            return F.mse_loss(self(state)[:, 0], target)

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.training_step(batch, batch_idx))

    g = torch.Generator().manual_seed(0)
    state, ends, flag = torch.randn(600, 6, generator=g), *(torch.rand(2, 600, generator=g) < 0.2).float()
    return M(), *halves(state, state[:, 0], torch.randn(600, 6, generator=g), 0.9 * (1 - ends), flag)


@no_bug()
def validation_goes_on_by_itself():
    class M(planted.Forecaster):
        validates_with_targets = False

    return M(), *planted.waves()


@no_bug()
def loss_is_computed_where_targets_are_given():
    class M(LossOnly):
        """Returns the loss, too, if it gets targets."""

        def network(self):
            return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

        def forward(self, past, future=None):
            forecast = past[:, -1:] + self.net(past)
            return forecast, None if future is None else F.mse_loss(forecast, future)

        def loss(self, past, future):
            return self(past, future)[1]

    return M(), *planted.waves()


class BySubject(planted.Recordings):
    """Divides the subjects."""

    def setup(self, stage):
        x, y, subject = self.load()
        held = torch.tensor(subject) % 4 == 0
        self.train, self.val = TensorDataset(x[~held], y[~held]), TensorDataset(x[held], y[held])


@no_bug()
def subjects_are_in_one_split_each():
    return planted.OfSubjects(), BySubject(), None


@no_bug(max_epochs=6, accumulate_grad_batches=4)
def schedule_ends_after_all_steps():
    class M(planted.OfBatches):
        of_batches = False

    return M(), *digits()


@no_bug(max_epochs=6, accumulate_grad_batches=4)
def rate_falls_by_a_tenth_in_each_part():
    class M(Base):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 ** (step // 40))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return M(), *digits()
