from pathlib import Path

import pytest

from boltcutter.assembly.overrides import load_evaluation_config, load_run_config, read_overrides
from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.run import trust
from boltcutter.run.folder import create_folder

PROJECT = Project.find(__file__)


def made(tmp_path: Path, *overrides: str) -> Path:
    cfg = read_overrides(PROJECT, overrides)
    cfg = cfg.changed({"folder": str(tmp_path / "run")})
    create_folder(cfg, PROJECT.root)
    return cfg.place.folder


def test_a_run_is_loaded_with_new_overrides(tmp_path: Path) -> None:
    folder = made(tmp_path, "model=mlp", "model.hidden_sizes=[5]", "seed=3")
    cfg = read_overrides(PROJECT, [f"resume={folder}", "trainer.max_epochs=9"])
    assert cfg.model["hidden_sizes"] == [5]
    assert (cfg.data["seed"], cfg.trainer["max_epochs"], cfg.folder) == (3, 9, str(folder))
    again = read_overrides(PROJECT, [f"reproduce={folder}", "seed=4"])
    assert (again.data["seed"], again.folder, again.reproduce) == (4, None, str(folder))


def test_a_group_can_be_overridden(tmp_path: Path) -> None:
    cfg = load_run_config(PROJECT, made(tmp_path, "trainer=ddp", "trainer.devices=2"), ["trainer=default"])
    assert cfg.trainer["devices"] == 1
    assert cfg.choices["trainer"] == "default"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["resume=nowhere"], "=nowhere: "),
        (["reproduce=nowhere"], "=nowhere: "),
        (["resume=a", "reproduce=b"], "^resume and reproduce "),
    ],
)
def test_a_missing_run_is_reported_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_overrides(PROJECT, overrides)


@pytest.mark.parametrize("left", ["{", "", "{}", "[]", "null", '{"config": 1}', "\x00" * 20])
def test_a_damaged_record_is_reported_in_one_line(tmp_path: Path, left: str) -> None:
    folder = made(tmp_path)
    (folder / "record.json").write_text(left)
    for verb in ("resume", "reproduce"):
        with pytest.raises(ConfigError, match=r"record\.json .*; restore it") as error:
            read_overrides(PROJECT, [f"{verb}={folder}"])
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="damaged"):
        load_evaluation_config(PROJECT, {"run": str(folder)}, [])


@pytest.mark.parametrize(
    "overrides",
    [
        ["+callback.x._target_=os.system", "+callback.x.command=id"],
        ["+callback.x={_target_: os.system, command: id}"],
        ['+callback.x={"\\x5ftarget\\x5f": os.system, command: id}'],
        ['name="\\x24{oc.env:HOME}"'],
        ["data.folder=s3://theirs/${oc.env:HOME}"],
        ["+data.x={_target_: torch.nn.Linear, _check_: false}"],
        ["+data.url=http://theirs/x"],
        ["checkpoints=s3://theirs/x"],
        ["folder=/tmp/theirs"],
        ["runs=../../theirs"],
        ["logger=wandb", "logger.wandb.project=theirs"],
        ["callback.best.dirpath=/tmp/theirs"],
    ],
)
def test_arguments_of_an_agent_are_checked_as_a_record_of_somebody_else(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report that it has read may ask for them."""
    project = Project.find(__file__)
    monkeypatch.setenv(trust.AGENT, "1")
    with pytest.raises(ConfigError, match=r"^arguments: "):
        read_overrides(project, overrides)
    assert read_overrides(project, ["model=mlp", "trainer.max_epochs=3"]).model
    monkeypatch.delenv(trust.AGENT)
    assert read_overrides(project, overrides[:1])


def test_files_that_an_agent_names_are_checked_as_a_record_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No argument shows what is in such a file, and those in ``configs`` are the user's."""
    project = Project.find(__file__)
    monkeypatch.setenv(trust.AGENT, "1")
    (tmp_path / "x.yaml").write_text("callback:\n  x:\n    _target_: os.system\n    command: id\n")
    (tmp_path / "m.yaml").write_text("# A model.\n_target_: torch.nn.Flatten\nstart_dim:\n  _target_: os.getpid\n")
    for override in (f"experiment={tmp_path}/x.yaml", f"model={tmp_path}/m.yaml"):
        with pytest.raises(ConfigError, match=r"^arguments: .*os\."):
            read_overrides(project, [override])
    assert read_overrides(project, ["experiment=mnist", "logger=csv"]).model
