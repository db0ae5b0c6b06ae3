import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from boltcutter.cli.main import FLAGS, dispatch_command, one_line_errors, read_ranks
from boltcutter.config.compose import compose
from boltcutter.extend import Command
from boltcutter.project import Project, summary
from boltcutter.report.csv_table import write_csv

ROOT = Path(__file__).parents[2]
PROJECT = Project.find(__file__)
TRAIN = "Train a model: python scripts/train.py [group=option …] [key=value …]"
EVALUATE = "Evaluate a run: python scripts/evaluate.py run=<folder> [ckpt=best|last|path] [split=test] [key=value …]"
Script = Callable[..., subprocess.CompletedProcess[str]]
Read = Callable[..., list[str]]

LIGHT = """
import runpy, sys, time
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("torch" in sys.modules or "fsspec" in sys.modules, f"{time.process_time():.2f} CPU-seconds", file=sys.stderr)
"""


def light(*words: str) -> str:
    """What a script prints, having seen that it did so without torch and fsspec."""
    command = [sys.executable, "-c", LIGHT, "scripts/train.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("False"), done.stderr
    print(words, done.stderr)
    return done.stdout


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Read:
    """The lines that words in this process print."""

    def call(*words: str, usage: str = TRAIN) -> list[str]:
        dispatch_command(PROJECT, Command("boltcutter.planning.check:check_command", usage), None, words)
        return capsys.readouterr().out.splitlines()

    return call


def test_help() -> None:
    text = light("--help")
    for group, options in PROJECT.groups().items():
        assert f"\n{group}=\n" in text
        for option, file in options.items():
            assert re.search(rf"^  {option} +{re.escape(summary(file))}$", text, re.M), option
    assert all(flag in text for flag in FLAGS)
    assert "python scripts/train.py model=mlp trainer.max_epochs=5" in text
    assert max(map(len, text.splitlines())) <= 140
    assert light("-h") == text


def test_print() -> None:
    found = yaml.safe_load(light("--print", "model=mlp", "seed=3", "trainer=ddp"))
    assert found["model"]["input_shape"] == [1, 8, 8]
    assert found["task"]["model"]["hidden_sizes"] == [256, 128]
    assert found["data"]["seed"] == 3
    assert found["trainer"]["strategy"]["_target_"].endswith("DDPStrategy")
    assert found["choices"]["trainer"] == "ddp"
    assert found["callback"]["best"]["dirpath"] == "runs/digits-mlp/<id>/checkpoints"


def test_paths_below_home_are_expanded_as_a_shell_does(said: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    found = yaml.safe_load("\n".join(said("--print", "folder=~/runs/a", "init_from=~/b.ckpt", "name=a~/b")))
    assert (found["folder"], found["checkpoints"]) == ("/home/me/runs/a", "/home/me/runs/a/checkpoints")
    assert (found["init_from"], found["name"]) == ("/home/me/b.ckpt", "a~/b")


@pytest.mark.parametrize("flag", ["--print", "--describe"])
def test_values_that_only_the_class_of_the_data_has_are_shown(
    flag: str, said: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "class Own(lightning.LightningDataModule):\n    shape, num_classes = (4,), 3\n"
    (tmp_path / "own_data.py").write_text(f"import lightning\n\n\n{source}")
    (tmp_path / "own.yaml").write_text("_target_: own_data.Own\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = said(flag, f"data={tmp_path}/own.yaml", "model=mlp", "logger=null")
    assert any(re.search(r"num_classes:? +3\b", line) for line in lines)


def test_print_hides_secrets(said: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "abc")
    lines = said("--print", "+logger.wandb.api_key=${oc.env:KEY}")
    assert "abc" not in "".join(lines)
    assert "    api_key: '***'" in lines


@pytest.mark.parametrize(
    "key", ["seed", "timeout", "trainer.devices", "trainer.accelerator", "init_from", "model._target_"]
)
def test_errors_hide_secrets(
    key: str, said: Read, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "0123456789abcdef")
    with pytest.raises(SystemExit):
        said(f"{key}=${{oc.env:MY_SERVICE_TOKEN}}x")
    error = capsys.readouterr().err
    assert "0123456789abcdef" not in error
    assert "***x" in error
    assert "***" in "".join(said("--describe", "name", "name=${oc.env:MY_SERVICE_TOKEN}"))


@pytest.mark.parametrize("word", ["resume", "reproduce", "run"])
def test_print_an_earlier_run(word: str, said: Read, tmp_path: Path) -> None:
    config = compose(PROJECT, ["model=mlp", "seed=5"]).written
    (tmp_path / "record.json").write_text(json.dumps({"config": config}))
    found = yaml.safe_load("\n".join(said("--print", f"{word}={tmp_path}", "data.batch_size=32")))
    assert (found["model"]["hidden_sizes"], found["seed"], found["data"]["batch_size"]) == ([256, 128], 5, 32)


def test_a_reader_that_ends_early() -> None:
    command = f"set -o pipefail; {sys.executable} -m boltcutter train --help | head -n 1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Train a model")


def test_describe(said: Read) -> None:
    from lightning import Trainer

    lines, options = (part.splitlines() for part in "\n".join(said("--describe", "trainer")).split("\n\n"))
    assert options[0] == "trainer="
    assert [line.split()[0] for line in options[1:]] == list(PROJECT.groups()["trainer"])
    keys = [line.split()[0] for line in lines]
    assert keys[0] == "trainer"
    assert {f"trainer.{name}" for name in vars(Trainer.__init__)["__wrapped__"].__annotations__} - set(keys) == {
        "trainer.return"
    }
    assert len({line.index(line.split()[1]) for line in lines}) == 1
    (line,) = (line for line in lines if line.startswith("trainer.max_epochs "))
    assert re.fullmatch(r"trainer\.max_epochs +20 +int \| null +Stop training once this number of epochs .*", line)


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ("--describe task", r"task\.label_smoothing +0\.0 +float +\w.*"),
        ("--describe task", r"task\.l1 +0\.0 +float +Factor of .*"),
        ("--describe task", r"task\.optimizer +\$\{optimizer\} +Callable.*"),
        ("--describe task", r"task\.metrics\.f1\.average +macro +.*"),
        ("--describe optimizer", r"optimizer\.betas +\[0\.9,0\.999\] +tuple\[.* +coefficients .*"),
        ("--describe optimizer optimizer=sgd", r"optimizer\.momentum +0\.9 +float +momentum factor.*"),
        (
            "model=mlp --describe task.model",
            r"model\.hidden_sizes +\[256,128\] +Sequence\[int\] +\w.*",
        ),
        (
            "--describe callback",
            r"callback\.best +\w+\.callback\.checkpoint\.\S+ +BestCheckpoint +\w.*",
        ),
        ("--describe", r"seed +0 +int +\w.*"),
        ("--describe data.batch_size", r"data\.batch_size +64 +int +Global batch size\b.*"),
    ],
)
def test_describe_a_key(words: str, pattern: str, said: Read) -> None:
    assert any(re.fullmatch(pattern, line) for line in said(*words.split()))


def test_modules_that_were_frozen_are_collected_when_the_process_ends() -> None:
    """Libraries report what is left then as leaked, as nanobind does of Triton's."""
    program = """
class Cycle:
    def __del__(self): print("collected")
with main._faster_imports():
    one = Cycle()
    one.itself = one
    del one
"""
    done = subprocess.run(
        [sys.executable, "-c", f"from boltcutter.cli import main\n{program}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "collected\n", done.stderr


def test_one_key_is_described_alone(said: Read) -> None:
    assert len(said("--describe", "data.batch_size")) == 1
    (line,) = said("--describe", "trainer.precision")
    assert "'64-true' | '64' | '32' | '16' | 'bf16' | null" in line
    assert "…" not in line


def test_check(said: Read) -> None:
    assert said("--check", "model=mlp", "callback=[default,ema,early_stopping]", "scheduler=null") == ["ok"]


def test_the_script_that_checks(script: Script) -> None:
    done = script("check", "optimizer=sgd")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


TEXT = ["model=gpt", "task=language"]
# For machines or libraries that may not be there: tests/strategy and tests/logger have these.
ELSEWHERE = ["trainer=fsdp", "trainer=deepspeed", "trainer=horovod", "trainer=tpu"]
ELSEWHERE += ["data=images", "data=shards", "data=huggingface", "data=tokens"]  # of files: tests/data
ELSEWHERE += [f"logger={name}" for name in ("aim", "comet", "mlflow", "trackio")]
if not [*distributions(name="keras")]:  # it needs Python 3.11; find_spec finds tests/keras
    ELSEWHERE += ["model=keras_convnet", "callback=keras_file"]
OPTIONS = [
    f"{p.parent.name}={p.stem}"
    for p in sorted(PROJECT.config_dirs[0].glob("*/*.yaml"))
    if p.parent.name not in ("launch", "search", "export")  # of other commands
]


@pytest.mark.parametrize("option", [option for option in OPTIONS if option not in ELSEWHERE])
def test_every_option_of_the_project_checks(option: str, said: Read) -> None:
    beside = {
        "task=regression": ["data=synthetic", "data.kind=regression"],
        "callback=keras_file": ["model=keras_convnet"],
        "data=tabular": ["experiment=diabetes"],
        "trainer=ddp": ["trainer.devices=1"],
        "trainer=pipeline": ["model=mlp"],
        "data=text": TEXT,
        "data=text_bpe": TEXT,
        "model=gpt": ["data=text", *TEXT],
        "task=language": ["data=text", *TEXT],
    }
    group, _, name = option.partition("=")
    chosen = f"callback=[default,{name}]" if group == "callback" else option
    *columns, last = said("--check", chosen, *beside.get(option, []))
    assert last == "ok"
    assert bool(columns) == (option in ("data=tabular", "experiment=diabetes"))  # what each column is read as


def test_complete_is_light() -> None:
    assert light("--complete", "model=ml").startswith("model=mlp\t")
    assert light("--complete", "seed=") == ""
    light("--complete", "resume=")  # runs of this clone, if there are any


def test_several_scripts_know_completion(said: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "train.py")])
    text = "\n".join(said("--completion"))
    assert all(f"{sys.executable}\t{ROOT}/scripts/{name}.py" in text for name in ("check", "evaluate", "train"))


def test_a_path_that_is_too_long_is_a_mistake(said: Read, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        said(f"run={'a' * 300}")
    assert end.value.code == 2
    assert re.fullmatch(r"error: .*File name too long: .*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    "argument", ["V", "--V", "V=1", "model=V", "data.batch_size=V", "seed=[V]", "+model.V=1", "resume=V", "run=V"]
)
@pytest.mark.parametrize("value", ["a\nerror: b", "\n", "a\r\x1b[2J\x85\u2028\u202e\udcff"])
def test_an_error_is_one_line_whatever_the_argument_contains(
    argument: str, value: str, said: Read, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        said("data=digits", argument.replace("V", value))
    assert end.value.code == 2
    assert re.fullmatch(r"error: .+\n", text := capsys.readouterr().err)
    assert text.rstrip("\n").isprintable()


def test_what_is_in_the_place_of_a_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("boltcutter.project._own_folders", set())  # with those of the tests
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "a.csv"):
        with pytest.raises(SystemExit) as end, one_line_errors():
            write_csv(path, {"a": [1]})
        assert end.value.code == 1
        assert re.fullmatch(r"error: .*; move away what is there, or .*\n", capsys.readouterr().err)


def test_an_error_of_the_project_has_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "own_code.py").write_text("import pathlib\npathlib.Path('.').write_text('')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    Project.at(tmp_path).activate()
    with pytest.raises(IsADirectoryError), one_line_errors():
        import_module("own_code")


def test_mpirun_takes_the_address_that_the_platform_gives() -> None:
    """Ranks of mpirun are read after the variables of the platform, which say where the first node is."""
    batch = {"AWS_BATCH_JOB_ID": "7#1", "AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "1"}
    batch |= {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "0", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.1"}
    sizes = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    with patch.dict(os.environ, batch | {f"OMPI_COMM_WORLD_{name}": value for name, value in sizes.items()}):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
            os.environ.pop(name, None)
        read_ranks()
        found = {name: os.environ[name] for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE", "NODE_RANK")}
    assert found == {"MASTER_ADDR": "10.0.0.1", "RANK": "3", "WORLD_SIZE": "4", "NODE_RANK": "1"}
