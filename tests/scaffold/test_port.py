"""Import of small projects, whose entry scripts need neither Hydra nor jsonargparse."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from boltcutter.cli.commands import main
from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.scaffold import port_lht
from boltcutter.scaffold.port import (
    MAX_COPIED,
    _data_folders,
    _ignored,
    _last_place,
    first_difference,
    import_command,
)
from boltcutter.scaffold.port_cli import config_files, entry_script
from boltcutter.scaffold.yaml_text import parse

PARTS = """
import lightning as L
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x)


class Lit(L.LightningModule):
    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer = None, lr: float = 0.1, batch_size: int = 0):
        super().__init__()
        self.net, self.optimizer, self.lr = net, optimizer, lr

    def step(self, batch, name):
        loss = ((self.net(batch[0])[:, 0] - batch[1]) ** 2).mean()
        self.log(name, loss)
        return loss

    def training_step(self, batch, index):
        return self.step(batch, "train/loss")

    def validation_step(self, batch, index):
        self.step(batch, "val/loss")

    def configure_optimizers(self):
        make = self.optimizer or (lambda params: torch.optim.SGD(params, lr=self.lr))
        optimizer = make(self.parameters())
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)  # of a metric of validation
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val/loss"}}


class Data(L.LightningDataModule):
    def __init__(self, data_dir: str = "", batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        x = torch.randn(48, 4)
        self.data = torch.utils.data.TensorDataset(x, x.sum(1))

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.data, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(self.data, self.batch_size)
"""
LHT = {
    "src/__init__.py": "",
    "src/parts.py": PARTS,
    "src/train.py": """
import sys, functools
import lightning as L, torch
from src.parts import Data, Lit, Net


class hydra:
    # Builds what Hydra would from configs/train.yaml.

    def main(**options):
        return lambda main: main

    def instantiate(group):
        return {
            "data": lambda: Data("data", batch_size=16),
            "model": lambda: Lit(Net(width=12), functools.partial(torch.optim.AdamW, lr=RATE)),
            "trainer": lambda: L.Trainer(max_epochs=5, accelerator="cpu", logger=False, gradient_clip_val=0.5),
        }[group]()


class cfg:
    data, model, trainer = "data", "model", "trainer"


@hydra.main(config_path="../configs", config_name="train.yaml")
def main(cfg):
    L.seed_everything(int(next(a for a in sys.argv if a.startswith("++seed=")).partition("=")[2]))
    data = hydra.instantiate(cfg.data)
    model = hydra.instantiate(cfg.model)
    trainer = hydra.instantiate(cfg.trainer)
    trainer.fit(model, datamodule=data)


main(cfg)
""",
    "configs/train.yaml": """# @package _global_
defaults:
  - _self_
  - data: small.yaml
  - model: small
  - callbacks: default
  - logger: null
  - trainer: default
  - paths: default
  - hydra: default
  - experiment: null
  - optional local: default
tags: [dev]
width: 12  # referred to by an option
task_name: train
train: true
ckpt_path: null
seed: null
""",
    "configs/model/small.yaml": """# The model.
_target_: src.parts.Lit
net:
  _target_: src.parts.Net
  width: ${width}
optimizer:
  _target_: torch.optim.AdamW
  _partial_: true
  lr: 0.01  # of all parameters
""",
    "configs/data/small.yaml": "_target_: src.parts.Data\ndata_dir: ${paths.data_dir}\nbatch_size: 16\n",
    "configs/callbacks/default.yaml": """defaults:
  - model_checkpoint
  - _self_
model_checkpoint:
  monitor: val/loss
  mode: min
  dirpath: ${paths.output_dir}/checkpoints
bar:
  _target_: lightning.pytorch.callbacks.RichProgressBar
""",
    "configs/callbacks/model_checkpoint.yaml": """model_checkpoint:
  _target_: lightning.pytorch.callbacks.ModelCheckpoint
  save_last: true
  save_top_k: 2
""",
    "configs/trainer/default.yaml": """_target_: lightning.pytorch.trainer.Trainer
default_root_dir: ${paths.output_dir}
max_epochs: 5
accelerator: cpu
gradient_clip_val: 0.5
""",
    "configs/trainer/ddp_sim.yaml": "defaults:\n  - default\naccelerator: cpu\ndevices: 2\nstrategy: ddp_spawn\n",
    "configs/paths/default.yaml": """root_dir: ${oc.env:PROJECT_ROOT}
data_dir: ${paths.root_dir}/data/
output_dir: ${hydra:runtime.output_dir}
""",
    "configs/hydra/default.yaml": "run:\n  dir: logs/${task_name}\n",
    "configs/experiment/fast.yaml": """# @package _global_
defaults:
  - override /model: small
  - override /trainer: default
model:
  optimizer:
    lr: 0.1  # faster
callbacks:
  model_checkpoint:
    save_top_k: 3
logger:
  wandb:
    group: fast
""",
    "configs/hparams_search/own.yaml": """# @package _global_
optimized_metric: val/loss
hydra:
  sweeper:
    direction: minimize
    n_trials: 7
    params:
      model.optimizer.lr: tag(log, interval(0.001, 0.1))
      data.batch_size: choice(8, 16)
""",
    "configs/local/default.yaml": "seed: 3\n",
    "configs/debug/default.yaml": """# @package _global_
task_name: debug
callbacks: null
logger: null
extras:
  enforce_tags: false
hydra:
  job_logging: {root: {level: DEBUG}}

  # verbose: true
trainer:
  max_epochs: 1
""",
    "configs/debug/fdr.yaml": "# @package _global_\ndefaults:\n  - default\ntrainer:\n  fast_dev_run: true\n",
}
CLI = {
    "mine/__init__.py": "",
    "mine/parts.py": PARTS,
    "main.py": """
import sys
import lightning as L, torch, yaml
from mine.parts import Data, Lit, Net


class OwnCLI:
    def __init__(self, model, data):
        given = dict(a.split("=") for a in sys.argv if "=" in a)
        values = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))
        L.seed_everything(int(given["--seed_everything"]))
        module = model(Net(**values["model"]["net"].get("init_args", {})), lr=values["model"].get("lr", 0.1))
        if "optimizer" in values:
            rates = values["optimizer"]["init_args"]
            module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), **rates)
        trainer = {k: v for k, v in values["trainer"].items() if k not in ("callbacks", "logger")}
        L.Trainer(**trainer, logger=False).fit(module, datamodule=data(**values["data"]))

    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.batch_size", "model.batch_size")
        parser.link_arguments("data.size", "model.net.init_args.size", apply_on="instantiate")


if __name__ == "__main__":
    OwnCLI(Lit, Data)
""",
    "configs/plain.yaml": """seed_everything: 3
model:
  net: {class_path: mine.parts.Net, init_args: {width: 16}}
  lr: 0.05
data: {batch_size: 16}
trainer: {max_epochs: 3, accelerator: cpu, gradient_clip_val: 0.5, logger: false}
""",
    "configs/callbacks.yaml": """model:
  net: {class_path: mine.parts.Net}
data: {batch_size: 8}
trainer:
  max_epochs: 3
  accelerator: cpu
  callbacks:
    - {class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {monitor: val/loss, dirpath: x}}
    - {class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: val/loss, patience: 5}}
    - {class_path: lightning.pytorch.callbacks.RichProgressBar}
""",
    "configs/optimizer.yaml": """model:
  net: {class_path: mine.parts.Net}
data: {batch_size: 8}
trainer: {max_epochs: 3, accelerator: cpu}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.01}}
""",
}
Make = Callable[[dict[str, str]], Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Write the files of a project."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "mine" / name).write_text(text)
        return tmp_path / "mine"

    return write


@pytest.mark.slow
def test_a_template_project_trains_alike(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    source = make({name: text.replace("RATE", "0.01") for name, text in LHT.items()})
    main(["import", str(source)])
    out = capsys.readouterr().out
    assert "train.yaml: the same losses in 20 steps from the same seed" in out
    assert "| configs/model/small.yaml | configs/task/small.yaml |" in out
    project = Project.at(Path(f"{source}-boltcutter"))
    assert (project.root / "src" / "parts.py").read_text() == (source / "src" / "parts.py").read_text()
    assert "# of all parameters" in (project.root / "configs" / "task" / "small.yaml").read_text()
    cfg = compose(project, ["experiment=fast", "trainer=ddp_sim", "folder=x"]).resolved
    assert (cfg["task"]["net"]["width"], cfg["task"]["optimizer"]["lr"]) == (12, 0.1)
    assert (cfg["callback"]["best"]["monitor"], cfg["callback"]["best"]["save_top_k"]) == ("val/loss", 3)
    assert "preemption" in cfg["callback"]
    assert "bar" not in cfg["callback"]
    assert (cfg["paths"]["output_dir"], cfg["tags"], cfg["trainer"]["strategy"]) == ("x", ["dev"], "ddp_spawn")
    debugged = compose(project, ["debug=fdr", "folder=x"]).resolved
    assert (debugged["trainer"]["fast_dev_run"], debugged["trainer"]["max_epochs"]) == (True, 1)
    assert (debugged["callback"], debugged["logger"], "extras" in debugged) == (None, None, False)
    assert "| configs/hparams_search/own.yaml | – | left out: " in out
    assert "| configs/callbacks/default.yaml: bar | – | left out; " in out


@pytest.mark.slow
def test_the_first_difference_is_named(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    source = make({name: text.replace("RATE", "0.02") for name, text in LHT.items()})
    with pytest.raises(SystemExit) as caught:
        main(["import", str(source), "--from", "lht"])
    assert caught.value.code == 1
    assert "train.yaml: the loss of step 2 differs: " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)  # six trainings, each in a process of its own
def test_configurations_of_lightning_cli_train_alike(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    source = make(CLI)
    main(["import", str(source), "--from", "cli"])
    out = capsys.readouterr().out
    for name in ("plain", "callbacks", "optimizer"):
        assert f"{name}.yaml: the same losses in 20 steps from the same seed" in out
    assert "link_arguments to model.net.init_args.size: left out, as Net takes no such argument |" in out
    configs = Path(f"{source}-boltcutter") / "configs" / "experiment"
    plain, callbacks, optimizer = (
        yaml.safe_load((configs / f"{name}.yaml").read_text()) for name in ("plain", "callbacks", "optimizer")
    )
    assert (plain["seed"], plain["task"]["batch_size"]) == (3, "${data.batch_size}")
    assert callbacks["callback"].keys() == {"best", "early_stopping"}
    assert optimizer["task"]["optimizer"] == {"_target_": "torch.optim.AdamW", "lr": 0.01, "_partial_": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "folder: missing, or more than one; write"),
        (["a", "--from", "hydra"], "--from=hydra: neither lht nor cli; leave it out"),
        (["a", "--fro", "cli"], "--fro=cli: no such flag; did you mean --from=cli?"),
        (["a", "--form=lht"], "--form=lht: no such flag; did you mean --from=lht? (there is: --from)"),
        (["no/such"], "import no/such: no such folder"),
        (["a", "--config", "no.yaml"], "--config=no.yaml: no such file"),
        (["a", "--config=no.yaml"], "--config=no.yaml: no such file"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["import", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_configuration_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(shutil, "copytree", pytest.fail)  # a folder such as one's home is not copied first
    for kind in ([], ["--from=lht"], ["--from", "cli"]):
        with pytest.raises(SystemExit):
            main(["import", str(tmp_path / "mine"), *kind])
        assert "; give the folder of one" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("configs/a.yaml", "a: " + "[" * 3000),
        ("config.yaml", "model: 1\ntrainer: x\n"),
        ("main.py", "CLI(\n"),
        ("main.py", f"CLI({'-' * 100_000}1)"),
        ("configs/a.yaml", "a: [1,"),
        ("pyproject.toml", "\xff"),
    ],
    ids=["deep", "types", "syntax", "deep syntax", "yaml", "text"],
)
def test_files_of_another_form_are_one_line(
    name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "their" / "configs").mkdir(parents=True)
    (tmp_path / "their" / "config.yaml").write_text("model: {class_path: torch.nn.Linear}\n")
    (tmp_path / "their" / name).write_text(content, encoding="latin-1")
    with pytest.raises(SystemExit) as end:
        main(["import", f"{tmp_path}/their", "--from", "cli"])
    assert end.value.code == 2
    assert re.fullmatch(r"error: .*their.*; correct it\n", capsys.readouterr().err)
    assert os.listdir(tmp_path) == ["their"]


MULTIPLY = "a0: &a0 [x, x]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(30))
MERGE = "a0: &a0 {x: 1}\n" + "".join(f"a{i + 1}: &a{i + 1}\n  <<: [*a{i}, *a{i}]\n" for i in range(30))
BAD_YAML = {
    "multiply": f"{MULTIPLY}defaults: *a30\nmodel: *a30\n",
    "merge": MERGE,
    "large": "a: b\n" * 60_000,
    "date": "model: 2026-99-99\n",
    "key": "[1]: 2\n",
    "tag": "model: !!python/object/apply:os.system [exit]\n",
    "open": "model: [1,",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BAD_YAML)
@pytest.mark.parametrize("file", ["train.yaml", "data/a.yaml", "callbacks/a.yaml", "experiment/a.yaml", "a.yml"])
def test_yaml_that_is_not_valid_or_multiplies_is_one_line(file: str, name: str, tmp_path: Path) -> None:
    place = tmp_path / "their"
    (place / "configs" / file).parent.mkdir(parents=True)
    (place / "configs" / "train.yaml").write_text("seed: 1\ndefaults: []\n")
    (place / "config.yaml").write_text("model: {class_path: torch.nn.Linear}\ntrainer: {}\n")
    (place / "configs" / file).write_text(BAD_YAML[name])
    with pytest.raises(ConfigError, match=r"their.*; correct it$") as error:
        import_command(Project.find(tmp_path), [str(place), "--from", "cli" if file == "a.yml" else "lht"])
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == ["their"]


def test_aliases_that_do_not_multiply_are_read() -> None:
    assert parse("a: &a {x: 1}\nb: *a\nc:\n  <<: *a\n  y: 2\n") == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}
    assert parse("") is None
    assert parse("a: &a {x: 1}\n" + "".join(f"b{i}: *a\n" for i in range(99)))["b98"] == {"x": 1}
    with pytest.raises(ValueError, match="too large"):
        parse("a: &a [*a]")


def test_fifos_devices_and_loops_of_links_are_not_copied(tmp_path: Path) -> None:
    place = tmp_path / "their" / "configs"
    place.mkdir(parents=True)
    for path in (place / "a.yaml", place.parent / "a.py", place.parent / "a"):
        os.mkfifo(path)
    for name, end in {"zero": "/dev/zero", "self": ".", "loop": "loop", "up": "../.."}.items():
        (place / name).symlink_to(end)
    (place.parent / "code.py").write_text("")
    (place.parent / "link.py").symlink_to("code.py")
    ignored = [_ignored(place.parent, folder, sorted(os.listdir(folder)), ()) for folder in (place.parent, place)]
    assert ignored == [{"a", "a.py"}, {"a.yaml", "zero", "self", "loop", "up"}]
    assert (entry_script(place.parent), config_files(place.parent)) == (None, [])
    (place / "train.yaml").write_text("model: {_target_: a.B}\n")
    layout = port_lht.Layout(place, place / "train.yaml", groups={"model": "task"})
    assert [file for file, _, _ in port_lht.convert(layout, tmp_path / "target")] == ["configs/train.yaml"]


def test_folders_of_data_are_linked(tmp_path: Path) -> None:
    for name in ("data/a.png", "docs/a.md", "package/data/a.py", "large/x.bin", "wandb/x.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    os.truncate(tmp_path / "large" / "x.bin", MAX_COPIED)  # sparse
    assert sorted(_data_folders(tmp_path)) == ["data", "large"]


def test_the_last_frame_of_the_project_is_named(tmp_path: Path) -> None:
    inner, other = tmp_path / "src" / "net.py", tmp_path.parent / "torch.py"
    lines = [f'  File "{file}", line {line}, in f' for file, line in ((inner, 7), (inner, 9), (other, 1))]
    assert _last_place(lines, tmp_path) == "src/net.py:9: "
    assert _last_place(lines[2:], tmp_path) == ""


def test_first_difference() -> None:
    assert first_difference([1.0, 0.5], [1.0, 0.5]) is None
    assert first_difference([1.0, 0.5], [1.0, 0.6]) == (
        "the loss of step 2 differs: 0.5 in the original, 0.6 in the import"
    )
    assert first_difference([1.0, 0.5], [1.0]) is not None


def test_code_of_another_user_is_not_executed_to_compare(tmp_path: Path, hand_over: Callable[[Path], None]) -> None:
    (tmp_path / "theirs").mkdir()
    hand_over(tmp_path / "theirs")
    with pytest.raises(ConfigError, match=r"belongs to another user .* copy it and import the copy"):
        import_command(Project.at(tmp_path), [str(tmp_path / "theirs")])
