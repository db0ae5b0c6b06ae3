import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import boltcutter
from boltcutter.cli.commands import commands, run

COMMANDS = commands()

ROOT = Path(__file__).parents[2]


def call(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "boltcutter", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_all_commands_are_listed_with_a_summary() -> None:
    done = call()
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == list(COMMANDS)
    assert call("--help").stdout == done.stdout


def test_files_are_read_as_utf_8_in_any_locale() -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # as in one of another encoding
    for arguments, shown in ([["--help"], "Usage: "], [["train", "--help"], "[group=option …]"]):
        command = [sys.executable, "-m", "boltcutter", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, env={**os.environ, **locale}, timeout=120)
        assert done.returncode == 0, done.stderr
        assert shown in done.stdout.decode()


def test_a_removed_working_directory_is_one_line(tmp_path: Path) -> None:
    command = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -m boltcutter train"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the working directory has been removed; change to one that exists\n"


@pytest.mark.slow
def test_the_version_names_the_commit_of_a_repository(tmp_path: Path) -> None:
    assert call("--version").stdout.startswith(f"boltcutter {boltcutter.__version__}")
    copy = tmp_path / "boltcutter"
    shutil.copytree(ROOT / "src" / "boltcutter", copy, ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "Begin"]):
        subprocess.run([*git, *arguments], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    code = "from boltcutter.cli.commands import main; main(['--version'])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}

    def version() -> str:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout

    assert version().endswith(f" ({copy}: commit {commit})\n")
    (copy / "new.py").touch()
    assert version().endswith(f" ({copy}: commit {commit} with uncommitted changes)\n")


def test_a_copy_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "python3" in path and "site-packages" not in path])
    assert boltcutter.__version__ == "0+unknown"


def test_an_interrupted_command_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("boltcutter.analysis.command.runs_command", interrupt)
    with pytest.raises(SystemExit) as end:
        run("runs", [], str(ROOT))
    assert end.value.code == 130


def test_an_unknown_command_is_a_mistake() -> None:
    done = call("trian")
    assert done.returncode == 2
    assert done.stderr.startswith("error: trian: no such command; did you mean train?")


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if not command.is_plain])
def test_every_command_exists(name: str) -> None:
    command = COMMANDS[name]
    for target in filter(None, (command.target, command.flags, command.begin, command.config)):
        module, _, attribute = target.partition(":")
        assert hasattr(import_module(module), attribute)
    assert command.usage.partition("\n")[0].split(": ", 1)[1].startswith(f"boltcutter {name}")


def test_a_script_and_the_console_command_give_the_same_help() -> None:
    script = subprocess.run([sys.executable, "scripts/train.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    usage, _, _ = call("train", "--help").stdout.partition("Flags:")
    assert script.stdout.startswith(usage.replace("boltcutter train", "python scripts/train.py"))


@pytest.mark.slow
def test_options_of_the_project_are_used_and_marked(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.boltcutter]\npackage = "small"\n')
    (tmp_path / "configs" / "model").mkdir(parents=True)
    (tmp_path / "configs" / "model" / "tiny.yaml").write_text("# A tiny model.\ndefaults: mlp\nhidden_sizes: [3]\n")
    (tmp_path / "src").mkdir()
    lines = call("train", "--help", cwd=tmp_path / "src").stdout.splitlines()
    assert "  tiny              A tiny model. (of the project)" in lines
    assert any(line.startswith("  mlp ") and "project" not in line for line in lines)
    described = call("train", "--describe", "model", cwd=tmp_path / "src").stdout.splitlines()
    assert described[described.index("model=") :] == lines[lines.index("model=") : lines.index("optimizer=")]
    completed = call("train", "--complete", "model=", cwd=tmp_path / "src").stdout.splitlines()
    assert "model=tiny\tA tiny model. (of the project)" in completed
    assert any(line.startswith("model=mlp\t") and "project" not in line for line in completed)
    done = call("check", "--print", "model=tiny", cwd=tmp_path / "src")
    assert "hidden_sizes:\n  - 3\n" in done.stdout
    wrong = call("check", "model=tinny", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "did you mean tiny? (project: tiny; built-in: convnet" in wrong.stderr


@pytest.mark.parametrize("arguments", [["train"], ["train", "model=mlp"], ["search"], ["find-batch-size"], ["launch"]])
def test_no_training_begins_outside_of_a_project(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BOLTCUTTER_PROJECT", raising=False)
    with pytest.raises(SystemExit) as ended:
        run(arguments[0], arguments[1:])
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert f"{tmp_path}: in no project" in shown.err
    assert "boltcutter new" in shown.err


@pytest.mark.slow
def test_a_folder_without_configs_uses_built_in_options(tmp_path: Path) -> None:
    folder = tmp_path / "Jürgen's project" / "notes"
    folder.mkdir(parents=True)
    (folder.parent / "pyproject.toml").write_text("[tool.boltcutter]\n")
    done = call("check", "model=mlp", cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_a_mistake_in_pyproject_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.boltcutter\n")
    done = call("check", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("setting", ['package = "small"\n', ""])
def test_classes_of_the_project_are_checked_like_built_in_ones(tmp_path: Path, setting: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.boltcutter]\n{setting}")
    (tmp_path / "configs" / "model").mkdir(parents=True)
    (tmp_path / "configs" / "model" / "tiny.yaml").write_text("# Tiny.\ndefaults: mlp\n_target_: small.Tiny\n")
    (tmp_path / "src").mkdir()
    code = "from boltcutter.model.mlp import MLP\nclass Tiny(MLP):\n    def __init__(self, **kwargs: object) -> None:\n"
    (tmp_path / "src" / "small.py").write_text(f"{code}        super().__init__(**kwargs)\n")
    given = ["model=tiny", "model.input_shape=[1,8,8]", "model.num_classes=10"]
    assert call("check", *given, cwd=tmp_path).stdout == "ok\n"
    wrong = call("check", *given, "model.hiden_sizes=[3]", cwd=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: model.hiden_sizes: Tiny takes no such argument; did you mean hidden_sizes?")
    (tmp_path / "src" / "small.py").write_text(f"{code}        raise KeyError('a bug')\n")
    assert "Traceback" in call("check", *given, cwd=tmp_path).stderr
