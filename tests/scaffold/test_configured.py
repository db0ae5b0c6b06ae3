from functools import partial

import torch
from lightning import Trainer
from lightning.pytorch.cli import ReduceLROnPlateau
from lightning.pytorch.demos.boring_classes import BoringModel

from boltcutter.scaffold.configured import with_optimizer


def test_the_optimizer_takes_the_place_of_that_of_the_module() -> None:
    module = with_optimizer(
        BoringModel(), partial(torch.optim.AdamW, lr=0.02), partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    )
    made = module.configure_optimizers()
    assert isinstance(made["optimizer"], torch.optim.AdamW)
    assert made["optimizer"].param_groups[0]["lr"] == 0.02
    assert isinstance(with_optimizer(BoringModel(), torch.optim.SGD).configure_optimizers(), torch.optim.SGD)


def test_the_monitor_of_lightning_cli_is_used() -> None:
    module = with_optimizer(BoringModel(), partial(torch.optim.SGD, lr=0.1), partial(ReduceLROnPlateau, monitor="x"))
    assert module.configure_optimizers()["lr_scheduler"]["monitor"] == "x"


def test_it_is_trained_with() -> None:
    module = with_optimizer(BoringModel(), partial(torch.optim.SGD, lr=0.0))
    before = [parameter.clone() for parameter in module.parameters()]
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(max_steps=2, limit_val_batches=0, accelerator="cpu", **options).fit(module)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
