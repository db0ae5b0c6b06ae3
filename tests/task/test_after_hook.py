from typing import Any

import lightning as L
import pytest

from boltcutter.task.after_hook import AfterHook


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def on_train_epoch_end(self) -> None:
        self.calls.append("module")


def test_a_function_is_called_once_after_the_hook() -> None:
    module = Module()
    AfterHook(module, "on_train_epoch_end", lambda: module.calls.append("after"))
    module.on_train_epoch_end()
    module.on_train_epoch_end()
    assert module.calls == ["module", "after", "module"]
    assert "on_train_epoch_end" not in vars(module)


@pytest.mark.parametrize("is_set_later", [False, True])
def test_a_hook_of_the_instance_is_called_and_kept(is_set_later: bool) -> None:
    module = Module()
    original: Any = module.on_train_epoch_end

    def own() -> None:
        module.calls.append("own")
        original()

    if not is_set_later:
        module.on_train_epoch_end = own  # type: ignore[method-assign]
    AfterHook(module, "on_train_epoch_end", lambda: module.calls.append("after"))
    if is_set_later:
        original = module.on_train_epoch_end
        module.on_train_epoch_end = own  # type: ignore[method-assign]
    module.on_train_epoch_end()
    assert module.calls == ["own", "module", "after"]
    assert vars(module)["on_train_epoch_end"] is own


def test_the_result_of_a_hook_is_returned() -> None:
    module = Module()
    AfterHook(module, "on_train_batch_start", lambda: None)
    module.on_train_batch_start = lambda batch, batch_idx: -1  # type: ignore[method-assign, assignment, misc]
    AfterHook(module, "on_train_batch_start", lambda: None)
    assert module.on_train_batch_start(None, 0) == -1
