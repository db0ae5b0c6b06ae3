import json
from pathlib import Path

import pytest
from conftest import QUICK, Script

from boltcutter import trust
from boltcutter.config import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"


def refused(target: str, folder: Path = Path("/nowhere")) -> bool:
    try:
        trust.check({"a": [{"b": {"_target_": target}}]}, "run=x", folder, CONFIGS)
    except ConfigError as error:
        return f"run=x: its record.json names {target}," in str(error) and "say trust=true" in str(error)
    return False


@pytest.mark.parametrize(
    "target",
    [
        "torch.nn.Linear",
        "torch.nn.functional.relu",
        "torch.optim.AdamW",
        "torch.optim.lr_scheduler.StepLR",
        "lightning.pytorch.callbacks.EarlyStopping",
        "torchmetrics.classification.MulticlassAUROC",
        "boltcutter.model.mlp.MLP",
        "boltcutter.callback.checkpoint.Best",
        "conftest.environment",
    ],
)
def test_known_classes_and_own_code_are_accepted(target: str) -> None:
    assert not refused(target)


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "subprocess.Popen",
        "builtins.eval",
        "runpy.run_path",
        "torch.load",
        "torch.hub.load",
        "torch.utils.cpp_extension.load_inline",
        "torch.nn.functional.torch.hub.load",
        "torch.nn.modules.module.torch.load",
        "torch.optim.adam.torch.load",
        "torchmetrics.metric.torch.load",
        "lightning.pytorch.cli.sys.exit",
        "boltcutter.lineage._git",
        "boltcutter.model.mlp.nn.modules.module.torch.load",
        "boltcutter.checkpoint.os.system",
        "pandas.eval",
        "numpy.load",
        "omegaconf.OmegaConf.load",
        "conftest.subprocess.run",
        "conftest.os.system",
        "",
        "..",
    ],
)
def test_anything_else_is_refused(target: str) -> None:
    assert refused(target)


def test_a_module_in_the_folder_of_the_run_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "theirs" / "one"
    folder.mkdir(parents=True)
    (folder / "evil.py").write_text("raise AssertionError('was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert refused("theirs.one.evil.Evil", folder)
    monkeypatch.syspath_prepend(folder)
    assert refused("evil.Evil", folder)


def test_what_the_configuration_files_of_the_project_name_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "own.yaml").write_text("_target_: pandas.DataFrame\n")
    trust.check({"_target_": "pandas.DataFrame"}, "run=x", tmp_path, tmp_path)


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """The folder of a run whose record would make a file when it is opened."""
    evil = {"_target_": "os.mkdir", "path": str(tmp_path / "evil")}
    record = {"id": "a", "name": "a", "config": {"data": evil, "runs": "runs", "name": "a"}, "attempts": []}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.json").write_text(json.dumps(record))
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train", ["resume={}"]),
        ("train", ["reproduce={}"]),
        ("evaluate", ["run={}"]),
        ("predict", ["run={}", "input=x"]),
        ("check", ["run={}"]),
    ],
)
def test_the_folder_of_a_stranger_is_not_executed(script: Script, strange: Path, name: str, words: list[str]) -> None:
    done = script(name, *(word.format(strange) for word in words))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "names os.mkdir" in done.stderr
    assert "say trust=true" in done.stderr
    assert not (strange.parent / "evil").exists()


def test_trust_is_given_by_one_word(script: Script, tmp_path: Path) -> None:
    done = script("train", *QUICK, "model=linear", "test=false", f"folder={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "run" / "record.json"
    record = json.loads(path.read_text())
    record["config"]["callback"]["counter"] = {"_target_": "collections.Counter"}
    path.write_text(json.dumps(record))
    words = ["--print", f"resume={tmp_path}/run"]
    assert script("train", *words).returncode == 2
    assert "collections.Counter" in script("train", *words, "trust=true").stdout
    wrong = script("train", *words, "trust=yes")
    assert (wrong.returncode, wrong.stderr) == (2, "error: trust=yes: expected trust=true or trust=false\n")
