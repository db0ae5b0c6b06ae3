"""Bugs of optimizers, schedules and gradients."""

import torch
from programs import Base, bug, digits, mlp
from torch import nn
from torch.nn import functional as F


@bug("not-cleared")
def zero_grad_overridden():
    """Optimizer_zero_grad is overridden and does nothing."""

    class M(Base):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            pass

    return M(), *digits()


@bug("not-cleared")
def manual_not_cleared():
    """Manual optimization without zero_grad."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(*batch))
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            self.optimizers().step()

    return M(), *digits()


@bug("cleared-before-step")
def cleared_in_hook():
    """Zero_grad in on_after_backward."""

    class M(Base):
        def on_after_backward(self):
            self.zero_grad()

    return M(), *digits()


@bug("two-optimizers")
def optimizer_of_other():
    """The discriminator's optimizer has the generator's parameters."""

    class M(Base):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.discriminator = nn.Sequential(nn.Linear(8, 64), nn.Sigmoid()), mlp(outputs=1)

        def training_step(self, batch, batch_idx):
            x = batch[0].flatten(1)
            opt_g, opt_d = self.optimizers()
            fake = self.generator(torch.randn(len(x), 8))
            opt_g.zero_grad()
            self.manual_backward(F.softplus(-self.discriminator(fake)).mean())
            opt_g.step()
            opt_d.zero_grad()
            self.manual_backward(
                (F.softplus(-self.discriminator(x)) + F.softplus(self.discriminator(fake.detach()))).mean()
            )
            opt_d.step()

        def validation_step(self, batch, batch_idx):
            pass

        def configure_optimizers(self):
            return torch.optim.Adam(self.generator.parameters(), 1e-3), torch.optim.Adam(
                self.generator.parameters(), 1e-3
            )

    return M(), *digits()


@bug("schedule-dead", "schedule-unit", max_epochs=4)
def step_lr_per_batch():
    """StepLR for epochs is called after each batch (SRGAN#94)."""

    class M(Base):
        def configure_optimizers(self):
            o = torch.optim.Adam(self.parameters(), 1e-2)
            return {
                "optimizer": o,
                "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(o, 2, 0.1), "interval": "step"},
            }

    return M(), *digits()


@bug("schedule-unit")
def cosine_per_epoch():
    """CosineAnnealingLR for steps is called once per epoch, Lightning's default."""

    class M(Base):
        def configure_optimizers(self):
            o = torch.optim.Adam(self.parameters(), 1e-2)
            return [o], [torch.optim.lr_scheduler.CosineAnnealingLR(o, int(self.trainer.estimated_stepping_batches))]

    return M(), *digits()


@bug("schedule-unit", max_epochs=4)
def cosine_per_step():
    """CosineAnnealingLR(T_max=max_epochs) is called after each batch."""

    class M(Base):
        def configure_optimizers(self):
            o = torch.optim.Adam(self.parameters(), 1e-2)
            s = torch.optim.lr_scheduler.CosineAnnealingLR(o, self.trainer.max_epochs)
            return {"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step"}}

    return M(), *digits()


@bug("schedule-dead", max_epochs=6)
def gamma_zero():
    """No schedule is meant, by StepLR(gamma=0) (VAME#26)."""

    class M(Base):
        def configure_optimizers(self):
            o = torch.optim.Adam(self.parameters(), 1e-2)
            return [o], [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0)]

    return M(), *digits()


@bug("divided-twice", accumulate_grad_batches=4)
def divided_twice():
    """Training_step divides by accumulate_grad_batches, as Lightning does."""

    class M(Base):
        def training_step(self, batch, batch_idx):
            return self.loss(*batch) / self.trainer.accumulate_grad_batches

    return M(), *digits()


@bug("rounded-away", precision="bf16-true")
def bf16_weights():
    """Weights in bfloat16 and a small rate: updates are rounded away."""

    class M(Base):
        lr = 1e-5

    return M(), *digits()


@bug("tiny-update")
def rate_in_percent():
    """A rate of 1e-3 is divided by the number of samples twice."""

    class M(Base):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-3 / 640 / 640)

    return M(), *digits()


@bug("tiny-update", gradient_clip_val=1e-06)
def clipped_to_nothing():
    """SGD with gradients clipped to a norm of 1e-6."""

    class M(Base):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    return M(), *digits()


@bug("decay", "collapse")
def decay_50():
    """AdamW with weight_decay=50."""

    class M(Base):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=50.0)

    return M(), *digits()


@bug("frozen-changes")
def frozen_decays():
    """A layer is frozen in mid-epoch, when it has momentum, and gradients are set to zero, not to None."""

    class M(Base):
        def on_train_batch_start(self, batch, batch_idx):
            if self.global_step == 5:
                self.net[1].requires_grad_(False)

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=False)

    return M(), *digits()


@bug("optimizer-state-lost", resume=True)
def state_lost():
    """On_load_checkpoint drops the state of the optimizer."""

    class M(Base):
        def on_load_checkpoint(self, checkpoint):
            for state in checkpoint["optimizer_states"]:
                state["state"] = {}

    return M(), *digits()


@bug("betas")
def betas_exchanged():
    """Betas of Adam in the wrong order."""

    class M(Base):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-3, betas=(0.999, 0.9))

    return M(), *digits()


@bug("group-without-rate", max_epochs=4)
def schedule_of_one_group_is_zero():
    """Two groups, and a schedule for each, of which the second is always 0."""

    class M(Base):
        def configure_optimizers(self):
            groups = [{"params": self.net[1].parameters()}, {"params": self.net[3].parameters()}]
            optimizer = torch.optim.Adam(groups, 1e-2)
            rates = [lambda step: 0.99**step, lambda step: step // 1_000_000]
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, rates)]

    return M(), *digits()
