from pathlib import Path
from typing import Any

import pytest
import yaml

from boltcutter.config.errors import ConfigError
from boltcutter.scaffold.port_lht import Conversion, Layout, callbacks, convert, find_layout, left_open, missing_main

CHECKPOINT = "lightning.pytorch.callbacks.ModelCheckpoint"
TRAIN = """
import hydra
import torch
from lightning import Trainer

@hydra.main(version_base=None, config_path="../conf", config_name="main.yaml")
def main(cfg):
    dm = hydra.utils.instantiate(cfg.dataset)
    net: object = hydra.utils.instantiate(cfg["system"], _recursive_=False)
    net = torch.compile(net)
    trainer: Trainer = hydra.utils.instantiate(cfg.trainer)
    trainer.fit(net, datamodule=dm)
"""
FILES = {
    "src/train.py": TRAIN,
    "conf/main.yaml": """defaults:
  - _self_
  - dataset: toy
  - system: small
  - loss: mse
  - cbs: null
  - trainer: default
  - optional local: default
  - experiment: null
width: 4
unused: 5
hydra: {job: {chdir: true}}
system: {lr: 0.5}
""",
    "conf/dataset/toy.yaml": "_target_: p.Data\nsize: ${width}\ndir: ${oc.env:PROJECT_ROOT,x}/data\n",
    "conf/system/small.yaml": """defaults:
  - net: mlp
_target_: p.Lit
_convert_: all
lr: 0.1
loss: ${loss}
out: ${hydra:runtime.output_dir}
""",
    "conf/system/net/mlp.yaml": "_target_: p.Mlp\nwidth: ${width}\nof: ${system.lr}\n",
    "conf/system/net/wide.yaml": "_target_: p.Wide\n",
    "conf/loss/mse.yaml": "_target_: torch.nn.MSELoss\n",
    "conf/trainer/default.yaml": (
        "max_epochs: 2\ngpus: 1\nauto_lr_find: true\nmax_steps: null\nenable_progress_bar: false\n"
    ),
    "conf/hydra/launcher/x.yaml": "a: 1\n",
    "conf/experiment/one.yaml": """# @package _global_
defaults:
  - override /system/net: wide
  - override /loss: mse
system: {net: {depth: 2}}
width: 9
""",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def converted(source: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The files that are written, and the notes by place."""
    layout = find_layout(source)
    assert layout is not None
    rows = convert(layout, source / "new")
    files = (source / "new").rglob("*.yaml")
    made = {file.relative_to(source / "new").as_posix(): yaml.safe_load(file.read_text()) for file in files}
    return made, {place: f"{became} {note}".strip() for place, became, note in rows}


def test_groups_are_what_the_script_gives_to_fit(source: Path) -> None:
    layout = find_layout(source)
    assert layout is not None
    assert (layout.configs, layout.main.name, layout.script) == (source / "conf", "main.yaml", source / "src/train.py")
    assert layout.groups == {"dataset": "data", "system": "task", "trainer": "trainer"}
    assert layout.not_recursive == {"system"}


def test_nested_groups_own_groups_and_inline_settings(source: Path) -> None:
    made, _ = converted(source)
    assert made["train.yaml"]["defaults"] == {
        "logger": None, "data": "toy", "task": "imported", "loss": "mse", "trainer": "default", "constants": "default"
    }  # fmt: skip
    assert made["task/imported.yaml"] == {"defaults": ["small"], "lr": 0.5}
    net = {"_target_": "p.Mlp", "width": "${constants.width}", "of": "${task.lr}"}
    assert made["task/small.yaml"] == {
        "net": net, "_target_": "p.Lit", "lr": 0.1, "loss": "${loss}", "out": "${folder}", "_recursive_": False
    }  # fmt: skip
    assert made["data/toy.yaml"] == {"_target_": "p.Data", "size": "${constants.width}", "dir": "./data"}
    assert made["loss/mse.yaml"] == {"_target_": "torch.nn.MSELoss"}
    assert made["constants/default.yaml"] == {"width": 4}
    experiment = made["experiment/one.yaml"]
    assert experiment["task"] == {"net": {"_target_": "p.Wide", "depth": 2}}
    assert (experiment["constants"], experiment["defaults"]) == ({"width": 9}, {"loss": "mse"})
    assert made["trainer/default.yaml"]["devices"] == 1
    assert "enable_progress_bar" not in made["trainer/default.yaml"]
    assert made["trainer/default.yaml"]["_target_"] == "lightning.pytorch.Trainer"


LIST = f"""- _target_: {CHECKPOINT}
  monitor: val_loss
- _target_: p.Early
  patience: ${{width}}
- _target_: p.Early
"""


def test_callbacks_and_loggers_in_a_list_are_named_by_their_class(source: Path) -> None:
    places = {"callbacks/some.yaml": f"# @package callbacks\n{LIST}", "callbacks/none.yaml": "[]\n"}
    places |= {
        "callbacks/more.yaml": "defaults: [some]\nlast: {_target_: p.Last}\n",
        "logger/two.yaml": "- _target_: p.Log\n",
    }
    inside = "".join(f"  {line}\n" for line in LIST.splitlines())
    places |= {"experiment/two.yaml": f"# @package _global_\ncallbacks:\n{inside}logger: [{{_target_: p.Log}}]\n"}
    for name, text in places.items():
        (source / "conf" / name).parent.mkdir(exist_ok=True)
        (source / "conf" / name).write_text(text)
    main = source / "conf/main.yaml"
    main.write_text(f"{main.read_text().replace('  - cbs: null', '  - callbacks: none')}logger:\n  - _target_: p.Log\n")
    made, _ = converted(source)
    named = {"best": {"monitor": "val_loss"}, "early": {"_target_": "p.Early", "patience": "${constants.width}"}}
    named["early_3"] = {"_target_": "p.Early"}
    log = {"log": {"_target_": "p.Log"}}
    assert made["callback/some.yaml"] == named
    assert made["callback/more.yaml"] == {"defaults": ["default", "some"], "last": {"_target_": "p.Last"}}
    assert (made["logger/two.yaml"], made["logger/imported.yaml"]) == (log, log)
    assert (made["experiment/two.yaml"]["callback"], made["experiment/two.yaml"]["logger"]) == (named, log)


def test_a_list_of_another_group_is_kept_or_refused(source: Path) -> None:
    (source / "conf/system/steps").mkdir()
    (source / "conf/system/steps/two.yaml").write_text("- _target_: p.One\n- _target_: p.Two\n")
    small = source / "conf/system/small.yaml"
    small.write_text(small.read_text().replace("  - net: mlp", "  - net: mlp\n  - steps: two"))
    assert converted(source)[0]["task/small.yaml"]["steps"] == [{"_target_": "p.One"}, {"_target_": "p.Two"}]
    (source / "conf/experiment/two.yaml").write_text("callbacks: [a]\n")
    (source / "conf/experiment/none.yaml").write_text("callbacks: []\n")
    main = (source / "conf/main.yaml").read_text().replace("cbs: null", "callbacks: null")
    (source / "conf/main.yaml").write_text(f"{main}logger: [csv]\n")
    made, notes = converted(source)
    assert made["experiment/none.yaml"]["defaults"] == {"callback": None}
    for place in ("experiment/two.yaml: callbacks", "main.yaml: logger"):
        assert notes[f"conf/{place}"] == "– left out, as its entries have no _target_"
    (source / "conf/loss/mse.yaml").write_text("- _target_: torch.nn.MSELoss\n")
    with pytest.raises(ConfigError, match=r"loss/mse.yaml: a list; write key: value"):
        converted(source)


def test_each_thing_that_is_left_out_is_a_row(source: Path) -> None:
    _, notes = converted(source)
    lost = ("auto_lr_find", "enable_progress_bar")
    for place in ("main.yaml: unused", "main.yaml: hydra", *(f"trainer/default.yaml: {key}" for key in lost)):
        assert notes[f"conf/{place}"].startswith("– left out"), place
    assert notes["conf/system/net/mlp.yaml"].startswith("– merged into")
    assert notes["conf/hydra/launcher/x.yaml"].startswith("– left out")


def test_a_configuration_without_a_class_of_a_module_is_refused(tmp_path: Path) -> None:
    for name, text in {"train.yaml": "defaults: [model: a]\n", "model/a.yaml": "width: 4\n"}.items():
        (tmp_path / "configs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "configs" / name).write_text(text)
    layout = find_layout(tmp_path)
    assert layout is not None
    with pytest.raises(ConfigError, match=r"train.yaml: no group of configs has the class of a LightningModule"):
        convert(layout, tmp_path / "new")


def test_a_main_file_that_is_not_there_is_named_with_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('import hydra\n\n@hydra.main("conf", "x")\ndef main(cfg): ...\n')
    assert missing_main(tmp_path) == "train.py:3: hydra.main reads conf/x.yaml, which is not there; add it"


def test_a_folder_of_another_machine_is_searched_in_the_project(source: Path) -> None:
    (source / "src" / "train.py").write_text(TRAIN.replace("../conf", "/kaggle/conf"))
    layout = find_layout(source)
    assert layout is not None
    assert layout.main == source / "conf" / "main.yaml"


def test_of_several_scripts_and_main_files_those_that_train_are_taken(source: Path) -> None:
    (source / "evaluation.py").write_text(TRAIN.replace("main.yaml", "eval.yaml").replace("../conf", "conf"))
    for name in ("eval.yaml", "train_all.yaml"):
        (source / "conf" / name).write_text(FILES["conf/main.yaml"])
    (source / "src" / "main.py").write_text(TRAIN.replace("main.yaml", "none"))
    (source / "src" / "train.py").unlink()
    layout = find_layout(source)
    assert layout is not None
    assert (layout.script, layout.main.name) == (source / "src" / "main.py", "train_all.yaml")


def test_references(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("k: 1\nm: ${model.x} ${k}\n")
    layout = Layout(tmp_path, tmp_path / "train.yaml", groups={"model": "task"})
    text = "# @package _global_\na: ${model.net}\nb: ${hydra:runtime.output_dir}/x\nc: ${models.x}\nd: ${k}${k2}\n"
    text += "n: logs/${now:%Y}/${k}\nl: [a, 1]\nm:\n- {b: ${now:%Y}, c: 1}\nf: {b: x_${now:%Y}, c: 1}\n"
    text += "e: ${hydra.runtime.cwd} ${len:${model}} ${.model}\n"
    expected = "a: ${task.net}\nb: ${folder}/x\nc: ${models.x}\nd: ${constants.k}${k2}\nn: ${folder}\nl: [a, 1]\n"
    expected += "m:\n- {b: ${folder}, c: 1}\nf: {b: ${folder}, c: 1}\n"
    assert Conversion(layout, tmp_path).with_references(text) == expected + "e: . ${len:${task}} ${.model}\n"


def test_checkpoint_callbacks() -> None:
    settings = {"monitor": "epoch", "mode": "max", "every_n_epochs": 2, "filename": "{epoch}", "dirpath": "x"}
    given = {
        "model_checkpoint": {"_target_": CHECKPOINT, **settings, "verbose": True, "save_last": True},
        "regular": {"_target_": CHECKPOINT, "every_n_train_steps": 5, "monitor": None},
        "bar": {"_target_": "lightning.pytorch.callbacks.RichProgressBar"},
    }
    found, notes = callbacks(given, {"model_checkpoint": "best", "regular": "regular"})
    assert found == {
        "best": {"monitor": "epoch", "mode": "max", "every_n_epochs": 2, "filename": "{epoch}"},
        "regular": {"_target_": CHECKPOINT, "every_n_train_steps": 5, "dirpath": "${checkpoints}"},
    }
    assert [note.partition(":")[0] for note in notes if "left out" in note] == ["model_checkpoint.dirpath", "bar"]


def test_callbacks_that_others_include_do_not_repeat_the_built_in_ones(source: Path) -> None:
    swa = "swa:\n  _target_: lightning.pytorch.callbacks.StochasticWeightAveraging\n"
    both = "defaults: [swa]\nswa: {swa_lrs: 0.1}\nearly_stopping: {patience: 3}\n"  # nothing makes the second
    for name, text in {"swa": swa, "both": both, "alone": swa, "default": swa, "more": "defaults: [default]\n"}.items():
        (source / "conf/callbacks").mkdir(exist_ok=True)
        (source / "conf/callbacks" / f"{name}.yaml").write_text(text)
    made, notes = converted(source)
    assert "defaults" not in made["callback/swa.yaml"]
    assert made["callback/both.yaml"] == {"defaults": ["default", "swa"], "swa": {"swa_lrs": 0.1}}
    assert notes["conf/callbacks/both.yaml: early_stopping"].startswith("– left out")
    assert made["callback/alone.yaml"]["defaults"] == ["default"]
    assert made["callback/default.yaml"]["defaults"] == ["default"]  # the built-in one, though another includes this


def test_options_that_are_left_open_have_to_be_given(source: Path) -> None:
    main = source / "conf" / "main.yaml"
    main.write_text(main.read_text().replace("dataset: toy", "dataset: ???"))
    layout = find_layout(source)
    assert layout is not None
    assert left_open(layout) == {"dataset": "toy"}
    assert converted(source)[0]["train.yaml"]["defaults"]["data"] == "???"
    assert any("dataset: to be given, as in data=<option>" in note for *_, note in convert(layout, source / "again"))
    main.write_text(main.read_text().replace("experiment: null", "experiment: ???"))
    assert left_open(layout) == {"experiment": "one"}
    assert converted(source)[0]["train.yaml"]["defaults"]["experiment"] == "???"


def test_a_main_file_without_groups_is_read(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "train.py").write_text(TRAIN.replace("../conf", "conf"))
    (tmp_path / "conf" / "main.yaml").write_text(
        "dataset: {_target_: p.Data}\nsystem: {_target_: p.Lit, lr: 0.1}\ntrainer: {_target_: lightning.Trainer}\n"
    )
    made, _ = converted(tmp_path)
    assert made["train.yaml"]["defaults"] == {
        "logger": None,
        "data": "imported",
        "task": "imported",
        "trainer": "imported",
    }
    assert made["task/imported.yaml"]["lr"] == 0.1


def test_an_option_at_another_place_is_merged_there(source: Path) -> None:
    (source / "conf" / "callbacks").mkdir()
    (source / "conf" / "callbacks" / "some.yaml").write_text("ema: {_target_: p.Ema}\n")
    (source / "conf" / "extra").mkdir()
    (source / "conf" / "extra" / "slow.yaml").write_text("decay: 0.9\n")
    one = source / "conf" / "experiment" / "one.yaml"
    one.write_text(
        one.read_text()
        .replace("system:", "callbacks: {ema: {every: 2}}\nsystem:", 1)
        .replace("defaults:\n", "defaults:\n  - /extra@callbacks.ema: slow\n")
    )
    main = source / "conf" / "main.yaml"
    main.write_text(main.read_text().replace("  - cbs: null\n", "  - callbacks: some\n  - extra@system: slow\n"))
    made, _ = converted(source)
    assert made["experiment/one.yaml"]["callback"]["ema"] == {"decay": 0.9, "every": 2}
    assert "extra" not in made["experiment/one.yaml"]["defaults"]
    assert made["task/imported.yaml"]["decay"] == 0.9


def test_a_main_file_that_is_given_on_the_command_line_is_the_first(source: Path) -> None:
    script = source / "src" / "train.py"
    script.write_text(script.read_text().replace("main.yaml", "absent"))
    layout = find_layout(source)
    assert layout is not None
    assert layout.main.name == "main.yaml"


def test_the_folder_of_the_configuration_may_be_what_a_function_returns(source: Path) -> None:
    (source / "src/train.py").write_text(TRAIN.replace('config_path="../conf"', "config_path=str(find_configs())"))
    layout = find_layout(source)
    assert layout is not None
    assert (layout.configs, layout.script) == (source / "conf", source / "src/train.py")


@pytest.mark.parametrize(("option", "chosen"), [("one", "one"), ("one.yaml", "one"), ("[one]", "one"), ("x", None)])
def test_an_experiment_that_the_main_file_selects_is_kept(source: Path, option: str, chosen: str | None) -> None:
    main = source / "conf/main.yaml"
    main.write_text(main.read_text().replace("experiment: null", f"experiment: {option}"))
    made, _ = converted(source)
    assert made["train.yaml"]["defaults"].get("experiment") == chosen


def test_settings_of_the_run_that_are_those_of_a_logger_are_their_values(source: Path) -> None:
    (source / "conf/logger").mkdir()
    (source / "conf/logger/own.yaml").write_text("own: {tags: [a, b], name: x}\n")
    main = source / "conf/main.yaml"
    texts = "tags: ${logger.own.tags}\nname: ${logger.own.name}-1\n"
    main.write_text(main.read_text().replace("  - experiment: null\n", "  - logger: own\n") + texts)
    made, _ = converted(source)
    assert (made["train.yaml"]["tags"], made["train.yaml"]["name"]) == (["a", "b"], "x-1")
    main.write_text(main.read_text().replace("name: ${logger.own.name}-1", "name: null"))
    assert "name" not in converted(source)[0]["train.yaml"]
