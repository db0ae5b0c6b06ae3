from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest

from boltcutter.checks.components import check_address, check_batches_and_clipping, check_components, check_type
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.data.digits import Digits
from boltcutter.topology import Topology


@pytest.mark.parametrize(
    ("trainer", "remedy"),
    [
        ({"accumulate_grad_batches": 0}, "try 1"),
        ({"limit_train_batches": 0.0}, "try 1.0"),
        ({"accelerator": "tpu", "plugins": ["${checkpoint_io}"]}, "trainer=tpu"),
        ({"max_epochs": -5}, "try 10, or -1 for no limit"),
        ({"max_steps": -2}, "try 10, or -1 for no limit"),
        ({"gradient_clip_val": -1}, "null for no clipping"),
        ({"gradient_clip_val": float("nan")}, "null for no clipping"),
        ({"accumulate_grad_batches": 2, "limit_train_batches": 1, "gradient_clip_val": None}, None),
    ],
)
def test_settings_with_which_lightning_trains_nothing_or_fails_are_refused(
    trainer: dict[str, Any], remedy: str | None
) -> None:
    if remedy is None:
        check_batches_and_clipping(trainer)
        return
    (name, value), *_ = trainer.items()
    with pytest.raises(ConfigError, match=rf"^trainer\.{name}={value} .*{remedy}"):
        check_batches_and_clipping(trainer)


@pytest.mark.parametrize("address", ["nowhere.invalid", "a" * 70, "10.0.0.300"])
def test_an_address_without_a_host_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    with pytest.raises(ConfigError, match=rf"^MASTER_ADDR={address}: no such host \(.+\); correct it, or unset it$"):
        check_address(Topology(1, 2, 2, 2, 2))
    check_address(Topology(1, 1, 1, 1, 1))
    check_address(Topology(2, 2, 2, 4, 4))  # which the cluster may name later
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    check_address(Topology(1, 2, 2, 2, 2))


def refuse(_: object) -> None:
    raise ValueError("task=x: refused")


@pytest.mark.parametrize(
    ("ranks", "callback", "message"),
    [
        (1, None, None),
        (3, None, r"data\.batch_size=64 does not divide over 3 ranks; try 66"),
        (1, SimpleNamespace(check_task=refuse), "task=x: refused"),
    ],
)
def test_components_may_refuse_one_another(ranks: int, callback: Any, message: str | None) -> None:
    task = L.LightningModule()
    arguments = (Settings({"data": {"shape": [1, 8, 8]}}), Topology(1, ranks, ranks, ranks, ranks), Digits(), task)
    if message is None:
        check_components(*arguments, [callback])
        return
    with pytest.raises(ConfigError, match=f"^{message}$"):
        check_components(*arguments, [callback])


def test_names_of_classes_that_are_more_or_fewer_than_the_classes_are_refused() -> None:
    data: Any = L.LightningDataModule()
    data.num_classes, data.classes = 1, ["malignant", "benign"]
    with pytest.raises(ConfigError, match=r"^data\.num_classes=1, but LightningDataModule\.classes has 2 names; set "):
        check_components(Settings({"data": {}}), Topology(1, 1, 1, 1, 1), data, L.LightningModule(), [])
    data.num_classes = 3  # with one for the background
    check_components(Settings({"data": {}}), Topology(1, 1, 1, 1, 1), data, L.LightningModule(), [])
    data = Digits(batch_size=8)
    data.num_classes = 3
    with pytest.raises(ConfigError, match=r"^data\.num_classes=3, but Digits\.classes has 10 names; set "):
        check_components(Settings({"data": {}}), Topology(1, 1, 1, 1, 1), data, L.LightningModule(), [])


def test_a_component_of_a_wrong_type_is_named() -> None:
    node = {"_target_": "builtins.dict"}
    check_type("task", node, None, L.LightningModule)
    with pytest.raises(ConfigError, match=r"^task\._target_=builtins\.dict: expected a lightning.*got builtins\.dict"):
        check_type("task", node, {}, L.LightningModule)
