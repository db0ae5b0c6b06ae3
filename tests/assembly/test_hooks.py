from typing import Any

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from boltcutter.assembly.hooks import check_hooks
from boltcutter.config.errors import ConfigError


def module(name: str, hook: Any) -> Any:
    return type("Old", (BoringModel,), {name: hook})()


def callback(name: str, hook: Any) -> Any:
    return type("Mine", (L.Callback,), {name: hook})()


def old_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_idx: int, optimizer_closure: Any) -> None:
    pass


@pytest.mark.parametrize("stage", ["training", "validation", "test"])
def test_epoch_ends_of_lightning_1(stage: str) -> None:
    old = module(f"{stage}_epoch_end", lambda self, outputs: None)
    with pytest.raises(ConfigError, match=rf"task: Old\.{stage}_epoch_end .*on_\w+_epoch_end"):
        check_hooks(old, {}, tests=True)
    if stage == "test":
        check_hooks(old, {}, tests=False)


def test_hooks_that_are_no_longer_called_are_named_unless_they_are_called() -> None:
    with pytest.warns(UserWarning, match=r"task: Old.on_epoch_end .* rename it to on_train_epoch_end"):
        check_hooks(module("on_epoch_end", lambda self: None), {}, tests=True)
    with pytest.warns(UserWarning, match=r"callback.mine: Mine.on_batch_end .* rename it to on_train_batch_end"):
        check_hooks(
            BoringModel(), {"callback.mine": callback("on_batch_end", lambda self, trainer, module: None)}, tests=True
        )
    both = {"on_epoch_end": lambda self: None, "on_train_epoch_end": lambda self: self.on_epoch_end()}
    check_hooks(type("Both", (BoringModel,), both)(), {}, tests=True)  # for both versions of Lightning


@pytest.mark.parametrize(
    ("name", "hook", "extra"),
    [
        ("on_train_batch_start", lambda self, batch, batch_idx, dataloader_idx: None, "dataloader_idx"),
        ("on_before_optimizer_step", lambda self, optimizer, optimizer_idx: None, "optimizer_idx"),
        ("optimizer_step", old_step, "optimizer_idx"),
        ("on_train_epoch_end", lambda self, outputs: None, "outputs"),
    ],
)
def test_modules_whose_hooks_take_more(name: str, hook: Any, extra: str) -> None:
    with pytest.raises(ConfigError, match=rf"task: Old\.{name} takes {extra}, as in Lightning 1"):
        check_hooks(module(name, hook), {}, tests=True)


@pytest.mark.parametrize(
    ("name", "hook", "extra"),
    [
        (
            "on_train_batch_end",
            lambda self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx: None,
            "dataloader_idx",
        ),
        ("on_train_epoch_end", lambda self, trainer, pl_module, outputs: None, "outputs"),
        ("on_before_zero_grad", lambda self, trainer, pl_module, optimizer, index: None, "index"),
    ],
)
def test_callbacks_whose_hooks_take_more(name: str, hook: Any, extra: str) -> None:
    with pytest.raises(ConfigError, match=rf"callback\.mine: Mine\.{name} takes {extra}"):
        check_hooks(BoringModel(), {"callback.mine": callback(name, hook)}, tests=True)


def test_hooks_of_lightning_2() -> None:
    class Fine(L.Callback):
        on_before_backward = None  # type: ignore[assignment]

        def on_train_batch_end(self, *args: Any, **options: Any) -> None:
            pass

        def on_validation_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int
        ) -> None:
            pass

        def on_train_epoch_end(self, trainer: Any, pl_module: Any, extra: int = 0) -> None:
            pass

    instance = BoringModel()
    instance.on_train_start = lambda: None  # type: ignore[method-assign]
    check_hooks(instance, {"fine": Fine(), "summary": L.pytorch.callbacks.ModelSummary()}, tests=True)
