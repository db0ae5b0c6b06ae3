from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, ProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from third_party.gallery import DATA, HERE, overrides

from boltcutter.assembly.assemble import Components, assemble, build_loggers, complete_config, read_config
from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.logger.csv_logger import CSVLogger
from boltcutter.project import Project

PROJECT = Project.find(__file__)


def assembled(tmp_path: Path, *overrides: str, with_callbacks: bool = True) -> Components:
    cfg = read_config(PROJECT, [*overrides, "logger=null"])
    cfg = cfg.changed({"folder": str(tmp_path)})
    return assemble(cfg, with_callbacks=with_callbacks)


def test_components_follow_the_overrides(tmp_path: Path) -> None:
    components = assembled(tmp_path, "model=mlp", "trainer.max_epochs=3")
    assert type(components.task.model).__name__ == "MLP"
    assert components.trainer.max_epochs == 3
    assert [type(logger).__name__ for logger in components.trainer.loggers] == ["CSVLogger"]  # whatever was chosen
    assert components.trainer.default_root_dir == str(tmp_path)


@pytest.mark.filterwarnings("ignore:Attribute '.*' is an instance of `nn.Module`")  # Lightning's, of one of them
@pytest.mark.parametrize("name", DATA)
def test_other_lightning_modules_need_only_a_target(tmp_path: Path, name: str) -> None:
    components = assembled(tmp_path, *overrides(name))
    assert type(components.task).__module__.startswith("third_party.")


def test_a_task_may_define_its_dataloaders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    components = assembled(tmp_path, *overrides("own_loaders"))
    assert components.data is None
    assert not capsys.readouterr().out
    assembled(tmp_path, f"task={HERE}/task/own_loaders.yaml")
    assert capsys.readouterr().out.startswith("note: data=digits is used instead of")


@pytest.mark.parametrize("more", [[], ["callback=null"]])
def test_a_barebones_trainer_has_no_loggers_and_saves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    trainer = assembled(tmp_path, "trainer.barebones=true", *more).trainer
    assert trainer.barebones
    assert trainer.loggers == trainer.checkpoint_callbacks == []
    assert ("callback.best" in capsys.readouterr().out) == (not more)


def test_spawned_ranks_of_a_strategy_of_lightning_get_a_launcher_that_forwards_signals(tmp_path: Path) -> None:
    strategy = "{_target_: lightning.pytorch.strategies.DDPStrategy, start_method: spawn}"
    overrides = ("trainer.accelerator=cpu", "trainer.devices=2", "data.batch_size=64", f"trainer.strategy={strategy}")
    launcher = assembled(tmp_path, *overrides).trainer.strategy.launcher
    assert type(launcher).__module__ == "boltcutter.strategy.process_launcher"


@pytest.mark.parametrize("is_registered", [False, True])
def test_a_strategy_keeps_the_checkpoint_io_that_it_was_given(tmp_path: Path, is_registered: bool) -> None:
    strategy = "{_target_: lightning.pytorch.strategies.SingleDeviceStrategy, device: cpu, checkpoint_io: {_target_: "
    strategy += "lightning.fabric.plugins.TorchCheckpointIO}}"
    if is_registered:
        strategy, options = "own", {"device": torch.device("cpu"), "checkpoint_io": TorchCheckpointIO()}
        StrategyRegistry.register("own", SingleDeviceStrategy, **options)
    try:
        trainer = assembled(tmp_path, "trainer.accelerator=cpu", f"trainer.strategy={strategy}").trainer
    finally:
        StrategyRegistry.pop("own", None)
    assert type(trainer.strategy.checkpoint_io) is TorchCheckpointIO


def test_a_checkpoint_of_a_failed_run_is_removed_by_the_callback_that_saved_it(tmp_path: Path) -> None:
    folder = tmp_path / "failed"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, folder / "on_exception.ckpt")
    callback = f"{{_target_: lightning.pytorch.callbacks.OnExceptionCheckpoint, dirpath: {folder}}}"
    trainer = assembled(tmp_path, f"+callback.failure={callback}").trainer
    for _ in range(2):  # then there is none
        for each in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(each, OnExceptionCheckpoint):
                each.teardown(trainer, L.LightningModule(), "fit")
    assert not list(folder.iterdir())


@pytest.mark.parametrize("override", ["callback.best=null", "~callback.best"])
def test_the_best_checkpoint_can_be_disabled(tmp_path: Path, override: str) -> None:
    callbacks: list[Any] = assembled(tmp_path, override).trainer.callbacks  # type: ignore[attr-defined]
    assert {"Progress", "LastCheckpoint"} <= {type(callback).__name__ for callback in callbacks}


def test_assembling_writes_nothing(tmp_path: Path) -> None:
    assembled(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "overrides", [["callback=null"], ["callback.best=null", "callback.last=null", "callback.progress=null"]]
)
def test_lightning_adds_no_default_callbacks(tmp_path: Path, overrides: list[str]) -> None:
    callbacks = assembled(tmp_path, *overrides).trainer.callbacks  # type: ignore[attr-defined]
    assert not any(isinstance(callback, ModelCheckpoint | ProgressBar) for callback in callbacks)


def test_two_progress_bars_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"callback.progress, callback.rich: .*; use callback.progress=null$"):
        assembled(tmp_path, "+callback.rich._target_=lightning.pytorch.callbacks.TQDMProgressBar")


def test_evaluation_has_no_callbacks_and_a_logger_that_takes_all_calls(tmp_path: Path) -> None:
    trainer = assembled(tmp_path, with_callbacks=False).trainer
    assert [isinstance(logger, CSVLogger) for logger in trainer.loggers] == [True]
    trainer.loggers[0].log_image("key", [])  # type: ignore[attr-defined]
    trainer.loggers[0].experiment.add_image("key")
    assert trainer.log_dir == trainer.loggers[0].save_dir == str(tmp_path)
    assert not list(tmp_path.iterdir())
    assert trainer.checkpoint_callback is None  # type: ignore[attr-defined]


def test_initial_weights_depend_only_on_the_seed(tmp_path: Path) -> None:
    def weight(seed: int) -> torch.Tensor:
        return next(assembled(tmp_path, f"seed={seed}").task.parameters())

    assert torch.equal(weight(1), weight(1))
    assert not torch.equal(weight(1), weight(2))


def test_sizes_are_inferred_from_the_data() -> None:
    cfg = read_config(PROJECT, ["experiment=diabetes"])
    assert cfg.data["shape"] == [10]
    assert cfg.model["input_shape"] == [10]
    assert cfg.data["num_classes"] == 1


def test_sizes_are_inferred_from_data_that_refers_to_another_group(tmp_path: Path) -> None:
    for name, text in (
        ("data/mine", "defaults: tabular\npath: ${paths.table}\ntarget: y"),
        ("paths/mine", "table: t.csv"),
    ):
        (tmp_path / "configs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "configs" / f"{name}.yaml").write_text(
            f"# Mine.\n{text.replace('t.csv', str(tmp_path / 't.csv'))}\n"
        )
    (tmp_path / "t.csv").write_text("a,b,y\n" + "1,2,3\n2,3,5\n" * 20)
    cfg = read_config(Project.at(tmp_path), ["data=mine", "paths=mine", "model=linear", "task=regression"])
    assert (cfg.data["shape"], cfg.model["num_classes"]) == ([2], 1)


def test_a_mistake_in_the_data_is_reported_once() -> None:
    with pytest.raises(ConfigError, match=r"^data\.targett: .*\nx: "):
        read_config(PROJECT, ["experiment=diabetes", "+data.targett=3", "+x=1"])


@pytest.mark.parametrize(("key", "value"), [("trainer", None), ("trainer", [1]), ("data", 3)])
def test_groups_without_settings_are_one_line(key: str, value: Any) -> None:
    cfg = read_config(PROJECT, []).without(key).changed({key: value})
    with pytest.raises(ConfigError, match=rf"^{key}=.*: no settings; choose a file of configs/{key}$"):
        complete_config(cfg)


@pytest.mark.parametrize("key", ["seed", "timeout"])
def test_a_component_in_place_of_a_number_is_one_line(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}\._target_=os\.getpid: expected a number; set {key}=1$"):
        read_config(PROJECT, [f"{key}={{_target_: os.getpid}}"])


def test_a_mistake_in_a_value_of_several_lines_is_one_line() -> None:
    cfg = read_config(PROJECT, [])
    cfg = cfg.changed({"task": {"interval": "a\nb"}})
    with pytest.raises(ConfigError, match=r"^task\.interval=a\\nb: expected .*$"):
        complete_config(cfg)


def test_additional_config_groups(tmp_path: Path) -> None:
    configs = tmp_path / "configs"
    (configs / "head").mkdir(parents=True)
    (configs / "task").mkdir()
    (configs / "head" / "wide.yaml").write_text("# A wide one.\n_target_: torch.nn.Linear\nin_features: 64\n")
    (configs / "task" / "mine.yaml").write_text("# Mine.\n_target_: torch.nn.Sequential\n_args_: ['${head}']\n")
    with pytest.raises(ConfigError) as error:
        read_config(Project.at(tmp_path), ["task=mine", "head=wide"])
    assert set(str(error.value).splitlines()) == {
        "head.out_features: missing; Linear needs it (int)",
        "task=torch.nn.Sequential: expected LightningModule",
    }
    with pytest.raises(ConfigError, match=r"^head=wide: .*head"):
        read_config(Project.at(tmp_path), ["head=wide"])


def test_a_null_setting_of_the_data_is_named_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "null_parts.py").write_text(
        "from boltcutter import DataModule\n\nclass Rows(DataModule):\n"
        "    def __init__(self, shape: tuple[int, ...] | None = None, num_classes: int | None = None) -> None:\n"
        "        super().__init__()\n        self.shape, self.num_classes = shape, num_classes\n"
        "    def load(self): ...\n    def read(self, paths): ...\n"
    )
    (tmp_path / "rows.yaml").write_text("_target_: null_parts.Rows\nshape: null\nnum_classes: 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    named = r"^data\.shape=null: Rows\.infer_settings\(\) .*; set data\.shape.*$"
    with pytest.raises(ConfigError, match=named) as error:
        read_config(PROJECT, [f"data={tmp_path}/rows.yaml"])
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError) as error:
        read_config(PROJECT, [f"data={tmp_path}/rows.yaml", "data.num_classes=null", "seed=a"])
    mistakes = {line.partition("=")[0] for line in str(error.value).splitlines()}
    assert mistakes == {"data.shape", "data.num_classes", "seed"}


@pytest.mark.parametrize(
    ("given", "setting"), [("num_classes=5", "num_classes"), ("shape=[5000]", "shape"), ("kind=regression", "kind")]
)
def test_a_setting_that_contradicts_the_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, setting: str
) -> None:
    (tmp_path / "contradicted.py").write_text(
        "from boltcutter import DataModule\n\nclass Rows(DataModule):\n"
        "    def __init__(self, shape=None, num_classes=None, kind=None) -> None:\n        super().__init__()\n"
        "    def infer_settings(self): return {'shape': (4,), 'num_classes': 3, 'kind': 'classification'}\n"
        "    def load(self): ...\n"
    )
    (tmp_path / "rows.yaml").write_text("_target_: contradicted.Rows\nshape: null\nnum_classes: null\nkind: null\n")
    monkeypatch.syspath_prepend(tmp_path)
    chosen = [f"data={tmp_path}/rows.yaml", "model=mlp"]
    assert read_config(PROJECT, [*chosen, "data.shape=[4]"]).data["num_classes"] == 3
    with pytest.raises(ConfigError, match=rf"^data\.{setting}=.*: contradicts the data, .*; set data\.{setting}=null"):
        read_config(PROJECT, [*chosen, f"data.{given}"])


@pytest.mark.parametrize("name", ["..", "../../x", "a/../../x", "/tmp/x", "a//b", ".", "s3://bucket/x"])
def test_a_name_leads_to_a_folder_below_that_of_all_runs(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^name=.*: not the name of a folder below runs=runs; try name="):
        read_config(PROJECT, [f"name={name}"])


@pytest.mark.parametrize("target", ["os.system", "collections.Counter", "lightning.pytorch.loggers.CSVLogger"])
def test_a_callback_of_another_type_is_refused_before_it_is_called(target: str, tmp_path: Path) -> None:
    cfg = read_config(PROJECT, ["model=mlp", "logger=csv", f"folder={tmp_path}"])
    cfg = cfg.changed({"callback": {"x": {"_target_": target, "command": f"touch {tmp_path}/ran"}}})
    with pytest.raises(ConfigError, match=rf"^callback\.x\._target_={target}: expected a lightning\.pytorch\.Callback"):
        assemble(cfg)
    assert not (tmp_path / "ran").exists()


def test_a_name_with_control_characters_is_refused() -> None:
    """It names a folder, and would control the terminal wherever it is listed."""
    with pytest.raises(ConfigError, match=r"^name=a\\nb\\x1b\[2J: has control characters"):
        read_config(PROJECT, ['name="a\\nb\\x1b[2J"'])


class Shown(DummyLogger):
    """A logger of a service."""

    def __init__(self, tags: list[str], api_key: str, notes: str = "") -> None:
        super().__init__()
        self.tags, self.api_key, self.notes = tags, api_key, notes


def test_services_show_no_values_of_the_project_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "hunter2-canary")
    monkeypatch.setattr("boltcutter.config.redaction.private_variables", {"CANARY"})
    reference = "${oc.env:CANARY}"
    node = {"_target_": f"{__name__}.Shown", "tags": "${tags}", "api_key": reference, "notes": f"see {reference}"}
    cfg = Settings({"folder": str(tmp_path), "tags": ["a", f"b-{reference}"], "logger": {"shown": node}})
    (logger, *_) = build_loggers(cfg)
    assert isinstance(logger, Shown)
    assert (logger.tags, logger.notes, logger.api_key) == (["a", "b-***"], "see ***", "hunter2-canary")


class Server(DummyLogger):
    """A logger whose package is missing."""

    def __init__(self) -> None:
        raise ModuleNotFoundError("No module named 'mlflow'", name="mlflow")


def test_a_run_is_resumed_without_a_logger_that_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes: dict[str, Any] = {"server": {"_target_": f"{__name__}.Server"}}
    nodes |= {"shown": {"_target_": f"{__name__}.Shown", "tags": [], "api_key": ""}}
    cfg = Settings({"folder": str(tmp_path), "tags": [], "logger": nodes})
    with pytest.raises(ConfigError, match=r"^logger\.server: mlflow is not installed; pip install mlflow$"):
        build_loggers(cfg)
    cfg = cfg.changed({"resume": str(tmp_path)})
    assert [type(logger).__name__ for logger in build_loggers(cfg)] == ["Shown", "CSVLogger"]
    assert "warning: logger.server: mlflow is not installed; pip install mlflow; until then" in capsys.readouterr().err


class Tutorial(L.LightningModule):
    """A module whose step calls a network of floats, or itself."""

    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.net, self.direct = torch.nn.Conv2d(1, 10, 8), direct

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.net(x)
        return outputs

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.net if self.direct else self)(batch[0]).mean()


@pytest.mark.parametrize("direct", [True, False])
def test_other_modules_of_floats_get_pixels_as_floats(tmp_path: Path, direct: bool) -> None:
    (tmp_path / "tutorial.yaml").write_text(f"_target_: {__name__}.Tutorial\ndirect: {str(direct).lower()}\n")
    task: Any = assembled(tmp_path, f"task={tmp_path}/tutorial.yaml", "callback.best=null").task
    pixels = torch.full((2, 1, 8, 8), 255, dtype=torch.uint8)
    assert torch.equal(task.training_step((pixels,), 0), task.net(torch.ones(2, 1, 8, 8)).mean())


def test_no_link_of_somebody_else_leads_a_new_run_elsewhere(tmp_path: Path, hand_over: Callable[[Path], None]) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs" / "large").symlink_to(tmp_path / "disk")
    overrides = ["model=linear", f"runs={tmp_path / 'runs'}"]
    read_config(PROJECT, [*overrides, "name=large/a"])  # a link of this user
    hand_over(tmp_path / "runs" / "large")
    with pytest.raises(ConfigError, match=r"name=large/a: .*large is a link of another user"):
        read_config(PROJECT, [*overrides, "name=large/a"])
    read_config(PROJECT, [*overrides, "name=small"])
