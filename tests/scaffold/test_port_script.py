"""Projects whose scripts call the constructors of module and data themselves."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from boltcutter.assembly.data_values import node_of
from boltcutter.config.errors import ConfigError
from boltcutter.scaffold.port_lht import find_layout
from boltcutter.scaffold.port_script import constants, convert

SCRIPT = """
import hydra
import os
import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader
from parts import Data, Lit, samples

@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    job = make_name()
    net = hydra.utils.instantiate(cfg.net)
    options = dict(cfg.data)
    lit = MODEL
    dm = DATA
    saving = ModelCheckpoint(monitor="val_loss", dirpath="x")
    callbacks = [saving]
    callbacks.append(EarlyStopping("val_loss"))
    trainer = L.Trainer(max_epochs=cfg.epochs, callbacks=callbacks, precision=job, logger=job, gpus=1, old=2)
    trainer.fit(lit, dm)
"""
CONFIG = """defaults:
  - net: mlp
  - _self_
seed: 3
epochs: 2
data: {n: 64, dir: "${hydra:runtime.cwd}/d"}
"""
KEYS = {"net", "seed", "epochs", "data"}
PARTS = """
class Lit:
    def __init__(self, cfg, width=1): ...
class Data:
    def __init__(self, n, dir, batch=4): ...
"""


def converted(folder: Path, model: str, data: str) -> tuple[dict[str, Any], list[tuple[str, str, str]]]:
    script = SCRIPT.replace("MODEL", model).replace("DATA", data)
    net = "_target_: p.Mlp\nwidth: ${seed}\n"
    files = {"train.py": script, "parts.py": PARTS, "conf/config.yaml": CONFIG, "conf/net/mlp.yaml": net}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    layout = find_layout(folder)
    assert layout is not None
    assert {*constants(layout)} == KEYS
    rows = convert(layout, folder / "new")
    written = (folder / "new").rglob("*.yaml")
    made = {file.relative_to(folder / "new").as_posix(): yaml.safe_load(file.read_text()) for file in written}
    return made, rows


def test_what_a_script_constructs_refers_to_its_configuration(tmp_path: Path) -> None:
    made, rows = converted(tmp_path, 'Lit(cfg, width=cfg.get("width", 2))', 'Data(**cfg.data, batch=cfg["seed"])')
    assert made["task/imported.yaml"] == {
        "_target_": "parts.Lit",
        "cfg": "${constants}",
        "width": 2,
        "_recursive_": False,
    }
    assert made["data/imported.yaml"] == {
        "_target_": "parts.Data",
        "n": "${constants.data.n}",
        "dir": "${constants.data.dir}",
        "batch": "${constants.seed}",
    }
    assert made["constants/default.yaml"]["net"] == {"_target_": "p.Mlp", "width": "${constants.seed}"}
    assert made["constants/default.yaml"]["data"]["dir"] == "./d"
    assert made["trainer/imported.yaml"]["max_epochs"] == "${constants.epochs}"
    assert made["trainer/imported.yaml"]["devices"] == 1
    assert made["callback/imported.yaml"]["best"] == {"monitor": "val_loss"}
    assert made["callback/imported.yaml"]["earlystopping"]["_args_"] == ["val_loss"]
    assert made["train.yaml"]["seed"] == 3
    notes = {place: note for place, _, note in rows}
    assert "train.py:19: old" in notes
    assert notes["train.py:19: precision"] == "left out, as only the program knows make_name(); set trainer.precision"


NET = {"_target_": "p.Mlp", "width": "${constants.seed}"}


@pytest.mark.parametrize(
    ("model", "task"),
    [
        ("Lit(net, *[], width=1)", None),
        ("Lit(net, 5)", {"_target_": "parts.Lit", "cfg": NET, "width": 5}),
        ("Lit(cfg=net)", {"_target_": "parts.Lit", "cfg": NET}),
        ("hydra.utils.instantiate(cfg.net)", {"_target_": "p.Mlp", "width": "${constants.seed}"}),
        (
            "hydra.utils.instantiate(cfg.net, width=cfg.epochs, _recursive_=False)",
            {"_target_": "p.Mlp", "width": "${constants.epochs}", "_recursive_": False},
        ),
        ('Lit(f"{cfg.seed}-x")', {"_target_": "parts.Lit", "cfg": "${constants.seed}-x"}),
        ("Lit(1, width=dm.width)", {"_target_": "parts.Lit", "cfg": 1, "width": "${data.width}"}),
        ("Lit(5, width=dm.n)", {"_target_": "parts.Lit", "cfg": 5, "width": node_of("n")}),
        ("Lit(2 if cfg.get('x') else cfg.seed)", {"_target_": "parts.Lit", "cfg": "${constants.seed}"}),
        ("Lit(cfg.data.n if cfg.seed else 1)", {"_target_": "parts.Lit", "cfg": "${constants.data.n}"}),
        ("Lit(1 if job else 2)", None),
        ("Lit(len(dm.words))", None),
        ("Lit(cfg, net)", None),
        ("Lit(job)", None),
        ("5\n    n = 5\n    n += 1\n    lit = Lit(n)", None),
        ("5\n    for n in x:\n        n, lit = f()\n    lit = Lit(n)", None),
        ("Lit(cfg.nothing)", None),
        ("make(job)", None),
    ],
)
def test_values_that_only_the_program_knows_are_named(tmp_path: Path, model: str, task: Any) -> None:
    if task is not None:
        made, _ = converted(tmp_path, model, "Data(**options)")
        assert made["task/imported.yaml"] == task
        assert made["data/imported.yaml"]["n"] == "${constants.data.n}"
        return
    with pytest.raises(
        ConfigError, match=r"train.py:2\d: model of fit is made from .* only the program knows; .*configs/"
    ):
        converted(tmp_path, model, "Data(1)")


def test_loaders_become_a_data_module(tmp_path: Path) -> None:
    made, _ = converted(tmp_path, "Lit(1)", "DataLoader(samples(n=cfg.seed), batch_size=cfg.data.n)")
    assert made["data/imported.yaml"] == {
        "_target_": "boltcutter.scaffold.configured.with_loaders",
        "train": {
            "_target_": "torch.utils.data.DataLoader",
            "_args_": [{"_target_": "parts.samples", "n": "${constants.seed}"}],
            "batch_size": "${constants.data.n}",
        },
    }


def test_data_that_a_script_prepares_is_not_what_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SCRIPT", SCRIPT.replace("    saving =", "    dm.setup()\n    saving ="))
    with pytest.raises(ConfigError, match=r"model of fit is made from dm\.width, whose value only the program knows"):
        converted(tmp_path, "Lit(cfg, width=dm.width)", "Data(**options)")


@pytest.mark.parametrize(
    "made",
    [
        "make_all(cfg.get('extra'))",
        "[hydra.utils.instantiate(c) for c in cfg.extra.values()]",
        "[]\n    for _, c in cfg['extra'].items():\n        if '_target_' in c:\n            callbacks.append(make(c))",
    ],
)
def test_callbacks_of_a_group_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str) -> None:
    extra = "extra: {stop: {_target_: p.Stop, patience: '${epochs}'}, off: null, none: {patience: 1}}\n"
    monkeypatch.setattr(f"{__name__}.CONFIG", CONFIG + extra)
    lines = SCRIPT.replace("[saving]", made).replace('    callbacks.append(EarlyStopping("val_loss"))\n', "")
    monkeypatch.setattr(f"{__name__}.SCRIPT", lines)
    monkeypatch.setattr(f"{__name__}.KEYS", {"net", "seed", "epochs", "data", "extra"})
    found, _ = converted(tmp_path, "Lit(1)", "Data(**options)")
    assert found["callback/imported.yaml"] == {
        "defaults": ["default"],
        "stop": {"_target_": "p.Stop", "patience": "${constants.epochs}"},
    }


def test_variables_are_those_of_the_function_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "\ndef predict(cfg):\n    trainer = L.Trainer(max_epochs=99)\n    lit = Lit(99)\n"
    monkeypatch.setattr(f"{__name__}.SCRIPT", SCRIPT + other)
    made, _ = converted(tmp_path, "Lit(1)", "Data(**options)")
    assert made["task/imported.yaml"]["cfg"] == 1
    assert made["trainer/imported.yaml"]["max_epochs"] == "${constants.epochs}"


@pytest.mark.parametrize(
    ("lines", "task", "said"),
    [
        ("if cfg.seed == 3:\n        lit = Lit(1)\n    else:\n        lit = Lit(2)", 1, "cfg.seed == 3 is true"),
        ("if not cfg.seed:\n        lit = Lit(1)\n    else:\n        lit = Lit(2)", 2, "not cfg.seed is false"),
        (
            "if cfg.get('x') and job:\n        lit = Lit(1)\n    elif cfg.seed:\n        lit = Lit(2)",
            2,
            "as cfg.seed is true",
        ),
        ("lit = Lit(1)\n    if cfg.get('x') is not None:\n        lit = Lit(2)", 1, "is not None is false"),
        ("if cfg.seed:\n        lit = Lit(1)\n    lit = Lit(2)", 2, ""),
        (
            "match cfg.seed:\n        case 3:\n            lit = Lit(1)\n        case _:\n            lit = Lit(2)",
            1,
            "== 3 is true",
        ),
        ("n, lit = 1, Lit(2)", 2, ""),
        ("if job:\n        lit = Lit(1)\n    else:\n        lit = Lit(2)", None, ""),
    ],
)
def test_branches_are_decided_by_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, task: int | None, said: str
) -> None:
    later = "    trainer.fit(lit, dm)\n    lit = Lit(9)\n    trainer = L.Trainer(max_epochs=9)\n"  # of the test
    text = SCRIPT.replace("lit = MODEL", lines).replace("    trainer.fit(lit, dm)\n", later)
    monkeypatch.setattr(f"{__name__}.SCRIPT", text)
    if task is None:
        with pytest.raises(ConfigError, match=r"made from Lit\(1\) if job else Lit\(2\), whose value only the program"):
            converted(tmp_path, "", "Data(**options)")
        return
    made, rows = converted(tmp_path, "", "Data(**options)")
    assert made["task/imported.yaml"]["cfg"] == task
    assert made["trainer/imported.yaml"]["max_epochs"] == "${constants.epochs}"
    assert said in " ".join(note for _, _, note in rows)


@pytest.mark.parametrize(
    ("test", "is_kept", "said"),
    [("cfg.seed", True, "is true"), ("cfg.get('x')", False, "is false"), ("job", False, "only the program knows job")],
)
def test_a_callback_of_a_branch_is_kept_where_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: str, is_kept: bool, said: str
) -> None:
    appended = "    callbacks.append(EarlyStopping"
    monkeypatch.setattr(f"{__name__}.SCRIPT", SCRIPT.replace(appended, f"    if {test}:\n    {appended}"))
    made, rows = converted(tmp_path, "Lit(1)", "Data(**options)")
    assert ("earlystopping" in made["callback/imported.yaml"]) is is_kept
    assert said in " ".join(note for _, _, note in rows)


def test_a_list_of_callbacks_is_not_the_whole_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = "extra: {stop: {_target_: p.Stop}, other: {_target_: p.Other}}\n"
    monkeypatch.setattr(f"{__name__}.CONFIG", CONFIG + extra)
    monkeypatch.setattr(f"{__name__}.SCRIPT", SCRIPT.replace("[saving]", "[hydra.utils.instantiate(cfg.extra.stop)]"))
    monkeypatch.setattr(f"{__name__}.KEYS", {*KEYS, "extra"})
    made, _ = converted(tmp_path, "Lit(1)", "Data(**options)")
    assert {*made["callback/imported.yaml"]} == {"defaults", "stop", "earlystopping"}


def test_callbacks_that_are_added_in_other_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added = (
        "    callbacks += [p.One()]\n    callbacks.extend([p.Two()])\n    callbacks.insert(0, p.Three())\n    trainer ="
    )
    text = SCRIPT.replace("    trainer =", added).replace("import os", "import os, p")
    monkeypatch.setattr(f"{__name__}.SCRIPT", text)
    made, _ = converted(tmp_path, "Lit(1)", "Data(**options)")
    assert {"best", "earlystopping", "one", "two", "three"} <= {*made["callback/imported.yaml"]}


@pytest.mark.parametrize("branch", ["cfg.seed", "job"])
def test_a_trainer_of_a_branch_is_taken_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, branch: str) -> None:
    text = SCRIPT.replace("    trainer = L", f"    if {branch}:\n        trainer = L")
    other = "    else:\n        trainer = L.Trainer(max_epochs=9)\n    trainer.fit"
    monkeypatch.setattr(f"{__name__}.SCRIPT", text.replace("    trainer.fit", other))
    made, rows = converted(tmp_path, "Lit(1)", "Data(**options)")
    assert (made["trainer/imported.yaml"].get("max_epochs") == "${constants.epochs}") is (branch != "job")
    assert any(branch in note for _, _, note in rows)
