import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from boltcutter.cli.commands import main
from boltcutter.cli.translate import translate
from boltcutter.config.errors import ConfigError
from boltcutter.config.foreign import OPTIONS
from boltcutter.project import Project

PROJECT = Project.find(__file__)
GRID = ["search=grid", "search.space={}", "search.overrides=[]"]
Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("given", "command", "arguments"),
    [
        (["seed=1"], "train", ["seed=1"]),
        (["-m", "seed=1"], "train", ["seed=1"]),
        (["-m", "seed=1,2"], "search", [*GRID, "search.space.seed=grid(1, 2)"]),
        (
            ["a.b=range(3)", "--multirun", "c=[1,2]"],
            "search",
            [*GRID, "search.space.a.b=grid(0, 1, 2)", "c=[1,2]"],
        ),
        (["-m", "a=range(1, 2, 0.5)"], "search", [*GRID, "search.space.a=grid(1.0, 1.5)"]),
        (["-m", "+a=range(3,1,-1)"], "search", [*GRID, "search.space.a=grid(3, 2)"]),
        (["-m", "a=[1,2],[3]"], "search", [*GRID, "search.space.a=grid([1,2], [3])"]),
        (["-m", "a='x,y'"], "train", ["a='x,y'"]),
        (["-m", "task=glob(l*)"], "search", [*GRID, "search.space.task=grid(language)"]),
        (["callbacks=[default,ema]"], "train", ["callback=[default,ema]"]),
        (["~callbacks.best", "callbacks.last.filename=x"], "train", ["~callback.best", "callback.last.filename=x"]),
        (["callbacks.model_checkpoint.monitor=x"], "train", ["callback.best.monitor=x"]),
        (["hparams_search=optuna"], "search", ["search=optuna"]),
        (["-m", "hparams_search=optuna", "seed=3"], "search", ["search=optuna", "seed=3"]),
        (["ckpt_path=null"], "train", []),
        (["~callback.best", "+callback.best.monitor=x"], "train", ["~callback.best", "+callback.best.monitor=x"]),
    ],
)
def test_translate(given: list[str], command: str, arguments: list[str]) -> None:
    assert translate(PROJECT, "train", given) == (command, arguments)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["experiment=glob(*)"], "experiment=glob(*): stands for several values; add -m"),
        (["-m", "experiment=glob(no*)"], "experiment=glob(no*): matches no option (there are: diabetes"),
        (["-m", "a=interval(0, 1)"], "a=interval(0, 1): not a list of values; use boltcutter search search=optuna"),
        (["-m", "a=range(3, 1)"], "a=range(3, 1): the range is empty"),
        (["-m", "a=range(10000000000)"], "a=range(10000000000): the range is empty or too long"),
        (["-m", "a=range(.inf)"], "a=range(.inf): the range is empty or too long"),
        (["-m", "a=range(0, 1, .nan)"], "a=range(0, 1, .nan): the range is empty or too long"),
        (["-m", "a=range(x)"], "a=range(x): not a list of values"),
        (["-m", "hparams_search=optuna", "seed=1,2"], "-m: seed has several values besides a search"),
        (["--config", "x.yaml"], "--config: not a flag of this command; use experiment=x.yaml"),
        (["--config=x.yaml"], "--config=x.yaml: not a flag of this command; use experiment=x.yaml"),
        (["--cfg", "job"], "--cfg: not a flag of this command; use --print"),
        (
            ["--trainer.max_epochs", "5"],
            "--trainer.max_epochs: keys are given without dashes; use trainer.max_epochs=5",
        ),
        (["--data.init_args.x=5"], "--data.init_args.x=5: keys are given without dashes; use data.x=5"),
        (["--seed_everything=5"], "--seed_everything=5: keys are given without dashes; use seed=5"),
        (["ckpt_path=last"], "ckpt_path=last: which run?; use resume=<folder of a run>"),
        (["ckpt_path=no/such.ckpt"], "ckpt_path=no/such.ckpt: not in the folder of a run; init_from=no/such.ckpt"),
    ],
)
def test_what_has_no_meaning_names_the_argument_to_use(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(PROJECT, "train", given)
    assert str(caught.value).startswith(message)


def test_the_path_of_a_checkpoint_stands_for_its_run(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("{}")
    best, last = (tmp_path / "checkpoints" / name for name in ("best.ckpt", "last.ckpt"))
    assert translate(PROJECT, "train", [f"ckpt_path={last}"]) == ("train", [f"resume={tmp_path}"])
    assert translate(PROJECT, "train", [f"ckpt_path={tmp_path}"]) == ("train", [f"resume={tmp_path}"])
    assert translate(PROJECT, "evaluate", [f"ckpt_path={best}"]) == ("evaluate", [f"run={tmp_path}", f"ckpt={best}"])
    assert translate(PROJECT, "train", [f"ckpt_path={best}"]) == ("train", [f"resume={tmp_path}", f"ckpt={best}"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("trainer.gpus=2", "trainer.gpus: no such key; use trainer.devices=2 trainer.accelerator=gpu"),
        ("+trainer.gpus=0", "trainer.gpus: no such key; use trainer.accelerator=cpu"),
        ("trainer.resume_from_checkpoint=x", "trainer.resume_from_checkpoint: no such key; use resume=x"),
        ("task_name=x", "task_name: no such key; use name=x"),
        ("model.optimizer.lr=1", "model.optimizer.lr: no such key; use optimizer.lr=1"),
        ("debug=default", "debug=default: no such option; use debug=limit"),
        ("debug=fdr", "debug=fdr: no such option; use debug=fast"),
        ("debug=profiler", "debug=profiler: no such option; use debug=profile"),
        ("callbacks=none", "callback=none: no such option; use callback=null"),
        ("trainer=gpu", "trainer=gpu: no such option; use trainer.accelerator=gpu"),
        (
            "trainer=ddp_sim",
            "trainer=ddp_sim: no such option; use trainer=ddp trainer.accelerator=cpu trainer.devices=2",
        ),
    ],
)
def test_settings_of_others_name_those_to_use(given: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--print", given])
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_what_is_named_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for replacements in OPTIONS.values():
        for arguments in replacements.split(", or "):
            main(["train", "--print", *arguments.split()])
    assert capsys.readouterr().err == ""


def test_a_multirun_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["boltcutter", "train"])
    main(["train", "--print", "-m", "optimizer.lr=0.1,0.2", "trainer.max_epochs=7"])
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["search"]["space"] == {"optimizer.lr": "grid(0.1, 0.2)"}
    assert found["trainer"]["max_epochs"] == 7


def test_a_translated_key_is_not_given_twice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--print", "callbacks=default", "callback=ema"])
    assert capsys.readouterr().err.startswith("error: callback=ema: callback is given twice")


def test_a_group_of_the_project_is_not_renamed(tmp_path: Path) -> None:
    (tmp_path / "configs" / "callbacks").mkdir(parents=True)
    assert translate(Project.at(tmp_path), "train", ["callbacks=x"]) == ("train", ["callbacks=x"])


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("fit", "train"),
        ("validate", "evaluate"),
        ("-m seed=1,2", "boltcutter train -m seed=1,2"),
        ("model=mlp data=x", "boltcutter train model=mlp data=x"),
    ],
)
def test_subcommands_of_others(given: str, ours: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(given.split())
    assert f"{given.split()[0]}: no such command; use {ours} (" in capsys.readouterr().err


def test_a_multirun_is_checked_as_a_search(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["boltcutter", "train"])
    main(["train", "--check", "-m", "optimizer.lr=0.1,0.2", "seed=range(3)", "logger=null"])
    assert capsys.readouterr().out.endswith("ok: 6 trials\n")
    assert sys.argv[1:3] == ["search", "search=grid"] or "search=grid" in sys.argv


def test_two_runs_need_no_key(tmp_path: Path) -> None:
    given = ["runs/a", "best:val/loss", "--python-b=/venv/bin/python", "timeout=60"]
    expected = ["run=runs/a", "with=best:val/loss", "python_b=/venv/bin/python", "timeout=60"]
    assert translate(PROJECT, "bisect", given) == ("bisect", expected)
    assert translate(PROJECT, "bisect", ["run=a", "with=b"])[1] == ["run=a", "with=b"]
    odd = tmp_path / "lr=0.1"
    odd.mkdir()
    (odd / "record.json").touch()
    assert translate(PROJECT, "bisect", [str(odd), "latest"])[1] == [f"run={odd}", "with=latest"]
    assert translate(PROJECT, "compare", ["a", "b", "ckpt=best"])[1] == ["run=a", "with=b", "ckpt=best"]
    assert translate(PROJECT, "compare", ["a", "b", "--metric", "val/loss"])[1][:2] == ["a", "b"]
