from pathlib import Path
from typing import Any

import pytest
import yaml

from boltcutter.assembly.data_values import node_of
from boltcutter.config.errors import ConfigError
from boltcutter.scaffold.port_cli import (
    Cli,
    Converter,
    Experiment,
    Link,
    combine,
    config_files,
    convert,
    documented_sets,
    read_script,
    renamed,
    unnested,
)
from boltcutter.scaffold.yaml_text import Rows

SCRIPT = """
from lightning.pytorch import cli
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
import torch
import pkg.models as models
from pkg.data import Own as Data

class OwnCLI(cli.LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.add_lightning_class_args(EarlyStopping, "stop")
        parser.set_defaults({"stop.monitor": "val/loss", "trainer.max_epochs": 7, "model.lr": compute()})
        parser.add_optimizer_args(torch.optim.AdamW)
        parser.add_argument("--project")
        parser.link_arguments("data.size", "model.width")
        parser.link_arguments("data.batch_size", "model.batch_size")
        parser.link_arguments("trainer.max_epochs", "model.init_args.steps")
        parser.link_arguments("data.classes", "model.classes", apply_on="instantiate")
        parser.link_arguments(("a", "b"), "model.d", compute_fn=f)
    def before_fit(self): ...

OwnCLI(
    models.Net,
    datamodule_class=Data,
    seed_everything_default=4,
    run=False,
    trainer_class=torch.Own,
    trainer_defaults={"callbacks": [ModelCheckpoint(monitor="val/acc", mode="max")], "precision": 32},
    parser_kwargs={"default_config_files": ["base.yaml"]},
)
"""
FILES = {
    "main.py": SCRIPT,
    "pkg/models.py": "class Net(Base): ...\nclass Small: ...\n",
    "pkg/data.py": "class Own:\n    def __init__(self, size: int = 3, batch_size=8): ...\n",
    "base.yaml": "optimizer: {lr: 0.1}\ndata: {size: 5}\nproject: x\n",
    "configs/a.yaml": "model: {act: {class_path: ReLU}, part: {class_path: Small, k: 1}}\n",
    "configs/b.yaml": "trainer: {max_epochs: 3, gpus: 1, weights_summary: top, process_position: null}\n",
    "README.md": "python main.py --config configs/a.yaml \\\n   --config=configs/b.yaml --x 3\n",
}
MID = """
class Mid(LightningModule):
    def __init__(
        self, seed, size, n, a, opt: OptimizerCallable, plan: Callable[[Optimizer], LRScheduler],
        loss: Callable[[Tensor], Tensor], other
    ): ...
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def experiment_of(
    source: Path, values: dict[str, Any], cli: Cli | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    file = source / "x.yaml"
    file.write_text(yaml.safe_dump(values))
    experiment, notes = Converter(source, cli or Cli(), (file,)).convert()
    return experiment, {place.rpartition(": ")[2]: note for place, note in notes}


def test_what_a_script_says(source: Path) -> None:
    cli = read_script(source)
    assert cli.classes == {"model": "pkg.models.Net", "data": "pkg.data.Own", "optimizer": "torch.optim.AdamW"}
    assert cli.files == [source / "base.yaml"]
    assert (cli.has_subcommands, cli.defaults["seed_everything"], list(cli.unread)) == (False, 4, ["project"])
    assert cli.defaults["trainer"]["max_epochs"] == 7
    assert cli.unknown == [("main.py:11", "model.lr")]
    assert [(link.target, link.is_plain) for link in cli.links] == [
        ("model.width", True), ("model.batch_size", True), ("model.init_args.steps", True), ("model.classes", False),
        ("model.d", False),
    ]  # fmt: skip


def test_layers_defaults_links_and_short_names(source: Path) -> None:
    rows = Rows()
    (made,) = convert(source, source / "new", rows)
    assert made == Experiment("a-b", (source / "configs/a.yaml", source / "configs/b.yaml"), (), has_optimizer=True)
    experiment = yaml.safe_load((source / "new/experiment/a-b.yaml").read_text())
    assert experiment["seed"] == 4
    assert experiment["task"]["module"] == {
        "_target_": "pkg.models.Net",
        "act": {"_target_": "torch.nn.ReLU"},
        "part": {"_target_": "pkg.models.Small", "k": 1},
        "width": "${data.size}",
        "batch_size": "${data.batch_size}",
        "steps": "${trainer.max_epochs}",
        "classes": "${data.classes}",
    }
    assert experiment["task"]["optimizer"] == {"_target_": "torch.optim.AdamW", "lr": 0.1, "_partial_": True}
    assert experiment["data"] == {"_target_": "pkg.data.Own", "size": 5, "batch_size": 8}
    assert experiment["trainer"] == {"precision": 32, "max_epochs": 3, "devices": 1}
    assert experiment["callback"] == {
        "best": {"monitor": "val/acc", "mode": "max"},
        "early_stopping": {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val/loss"},
    }
    places = "\n".join(f"{place} | {note}" for place, _, note in rows)
    expected = ["trainer.weights_summary | left out", "project | left out", "main.py:11 | model.lr"]
    expected += ["main.py:18 | link_arguments to model.d: set task.module.d by hand"]
    expected += ["main.py:19 | before_fit: left out", "main.py:26 | trainer_class=torch.Own: left out"]
    assert [text for text in expected if text not in places] == []
    assert "process_position" not in places


def test_given_files_are_one_experiment(source: Path) -> None:
    (source / "README.md").unlink()
    rows = Rows()
    made = convert(source, source / "new", rows, [source / "configs/b.yaml", source / "configs/a.yaml"])
    assert [each.name for each in made] == ["b-a"]
    assert documented_sets(source, config_files(source)) == []
    (source / "configs/c.yaml").write_text("separator: ,")  # of another program
    assert convert(source, source / "new", rows, [source / "configs/a.yaml"])


def test_merging() -> None:
    below = {"a": {"class_path": "A", "init_args": {"x": 1}}, "l": [1], "c": {"class_path": "C", "init_args": {"x": 1}}}
    above = {"a": {"class_path": "B"}, "l+": 2, "c": {"init_args": {"y": 2}}}
    assert combine(below, above) == {
        "a": {"class_path": "B"}, "l": [1, 2], "c": {"class_path": "C", "init_args": {"x": 1, "y": 2}}
    }  # fmt: skip


def test_settings_below_a_subcommand() -> None:
    assert unnested({"fit": {"model": 1}}) == {"model": 1}
    assert unnested({"model": 1}) == {"model": 1}


def test_a_section_may_be_the_path_of_a_file(source: Path) -> None:
    (source / "net.yaml").write_text("class_path: m.Net\ninit_args: {w: 1}\n")
    experiment, _ = experiment_of(source, {"model": "net.yaml"})
    assert experiment["task"] == {"_target_": "m.Net", "w": 1}


def test_references_between_settings(source: Path) -> None:
    values = {
        "model": {"class_path": "m.Net", "init_args": {"n": "${trainer.max_epochs}", "m": "${model.init_args.n}"}}
    }
    experiment, _ = experiment_of(source, {**values, "seed_everything": True, "trainer": {"max_epochs": 2}})
    assert (experiment["task"]["n"], experiment["task"]["m"]) == ("${trainer.max_epochs}", "${task.n}")
    assert "seed" not in experiment


def test_a_model_without_a_class_is_refused(source: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.yaml: model has no class_path.*--config"):
        experiment_of(source, {"model": {"lr": 1}})


def test_an_optimizer_beside_the_module(source: Path) -> None:
    values = {
        "model": {"class_path": "m.Net"},
        "optimizer": {"class_path": "SGD", "init_args": {"lr": 1}},
        "lr_scheduler": {"class_path": "ReduceLROnPlateau", "init_args": {"monitor": "val/loss"}},
        "trainer": {"callbacks": {"class_path": "EarlyStopping"}, "logger": "CSVLogger", "enable_checkpointing": False},
        "ckpt_path": "x.ckpt",
    }
    experiment, notes = experiment_of(source, values)
    assert experiment["task"]["module"] == {"_target_": "m.Net"}
    assert experiment["task"]["optimizer"] == {"_target_": "torch.optim.SGD", "lr": 1, "_partial_": True}
    assert experiment["task"]["scheduler"]["_target_"] == "lightning.pytorch.cli.ReduceLROnPlateau"
    assert experiment["defaults"]["data"] is None
    assert experiment["callback"]["early_stopping"] == {"_target_": "lightning.pytorch.callbacks.EarlyStopping"}
    assert experiment["logger"] == {"csvlogger": {"_target_": "lightning.pytorch.loggers.CSVLogger"}}
    assert "resume=" in notes["ckpt_path"]
    assert "callback.best=null" in notes["trainer.enable_checkpointing"]


def test_null_that_a_logger_does_not_take_is_left_out(source: Path) -> None:
    given = {"save_dir": None, "version": None, "prefix": None, "x": None}  # Lightning CLI does not check null
    logger = [{"class_path": path, "init_args": given} for path in ("pytorch_lightning.loggers.CSVLogger", "p.Own")]
    experiment, notes = experiment_of(source, {"model": {"class_path": "m.Net"}, "trainer": {"logger": logger}})
    kept = {name: {*settings} - {"_target_"} for name, settings in experiment["logger"].items()}
    assert kept == {"csvlogger": {"save_dir", "version", "x"}, "own": {*given}}
    assert notes["trainer.logger.csvlogger.prefix"] == "left out: null, which is not of its type"


def test_links_of_unknown_values_are_noted(source: Path) -> None:
    cli = Cli(links=[Link("data.n", "model.n", "main.py:3", True)])
    values = {"model": {"class_path": "m.Net"}, "data": {"class_path": "m.Data"}}
    experiment, notes = experiment_of(source, values, cli)
    assert "n" not in experiment["task"]
    assert "set task.n by hand" in notes["main.py:3"]


def test_a_link_to_an_argument_that_the_class_lacks_is_left_out(source: Path) -> None:
    (source / "m.py").write_text("class Net(Base):\n    def __init__(self, width): ...\nclass Open(Base):\n    k = 1\n")
    links = [Link("data.n", f"model.init_args.{name}", f"main.py:{name}", True) for name in ("width", "seed")]
    values = {"model": {"class_path": "m.Net"}, "data": {"class_path": "m.Data", "init_args": {"n": 3}}}
    experiment, notes = experiment_of(source, values, Cli(links=links))
    assert experiment["task"] == {"_target_": "m.Net", "width": "${data.n}"}
    assert "Net takes no such argument" in notes["main.py:seed"]
    (source / "m.py").write_text("class Net(Mid):\n    def __init__(self, width, **rest): ...\n" + MID)
    experiment, notes = experiment_of(source, values, Cli(links=links))
    assert {*experiment["task"]} == {"_target_", "width", "seed"}
    (source / "m.py").write_text("class Net(L.LightningModule):\n    def __init__(self, width, **rest): ...\n")
    assert "main.py:seed" in experiment_of(source, values, Cli(links=links))[1]
    (source / "m.py").write_text(
        "class Net(L.LightningModule):\n    def __init__(self, width, **rest): self.seed = rest.get('seed', 1)\n"
    )
    assert experiment_of(source, values, Cli(links=links))[0]["task"]["seed"] == "${data.n}"
    (source / "m.py").write_text("class Open(Base):\n    k = 1\n")
    values["model"]["class_path"] = "m.Open"  # its constructor is elsewhere
    experiment, _ = experiment_of(source, values, Cli(links=links))
    assert experiment["task"]["seed"] == "${data.n}"


def test_a_link_to_an_attribute_of_the_data_is_a_reference(source: Path) -> None:
    (source / "m.py").write_text(MID)
    pairs = [("data.words", "seed"), ("data.size", "size"), ("data.hparams.n", "n"), ("model.a", "a")]
    links = [Link(end, f"model.{name}", f"main.py:{name}", False, is_attribute=True) for end, name in pairs]
    values = {"model": {"class_path": "m.Mid"}, "data": {"class_path": "pkg.data.Own", "init_args": {"size": 3}}}
    experiment, notes = experiment_of(source, values, Cli(links=links))
    assert experiment["task"]["seed"] == "${data.words}"
    assert experiment["task"]["size"] == node_of("size")  # it may be another value than that setting
    assert experiment["task"]["n"] == node_of("hparams.n")
    assert "set task.a by hand" in notes["main.py:a"]


def test_callbacks_in_a_section_of_sections(source: Path) -> None:
    own = {"save.often": "lightning.pytorch.callbacks.ModelCheckpoint"}
    cli = Cli(callbacks=own, defaults={"save": {"often": {"monitor": "a", "every_n_epochs": 5}}})
    experiment, _ = experiment_of(source, {"model": {"class_path": "m.Net"}}, cli)
    assert experiment["callback"] == {"best": {"monitor": "a", "every_n_epochs": 5}}


def test_optimizers_that_a_class_takes_are_called_by_it(source: Path) -> None:
    (source / "m.py").write_text(MID)
    parts = {name: {"class_path": f"m.{name}"} for name in ("opt", "plan", "loss")}
    parts["other"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 1}}
    experiment, _ = experiment_of(source, {"model": {"class_path": "m.Mid", "init_args": parts}})
    assert [name for name in parts if experiment["task"][name].get("_partial_")] == ["opt", "plan", "other"]


def test_overrides_are_renamed() -> None:
    made = Experiment("x", (), has_optimizer=True)
    assert renamed("model.init_args.lr=1", made) == "task.module.lr=1"
    assert renamed("optimizer.lr=1", made) == "task.optimizer.lr=1"
    assert renamed("model.lr=1", Experiment("x", ())) == "task.lr=1"
