import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from compared_runs import write_run
from conftest import require

from boltcutter.cli import completion
from boltcutter.cli.commands import commands
from boltcutter.cli.completion import complete, print_candidates
from boltcutter.cli.main import FLAGS
from boltcutter.project import Project

ROOT = Path(__file__).parents[2]
PROJECT = Project.find(__file__)
TRAIN = "Train a model: python scripts/train.py [group=option …] [key=value …]"
EVALUATE = "Evaluate a run: python scripts/evaluate.py run=<folder> [ckpt=best|last|path] [split=test] [key=value …]"
OPTIONS = [
    f"{p.parent.name}={p.stem}"
    for p in sorted(PROJECT.config_dirs[0].glob("*/*.yaml"))
    if p.parent.name not in ("launch", "search", "export")  # of other commands
]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("expe", "experiment="),
        ("m", "model= matmul_precision= model."),
        ("model=", " ".join([*(option for option in OPTIONS if option.startswith("model=")), "model=null"])),
        ("model=ml", "model=mlp"),
        ("+model=ml", "+model=mlp"),
        ("callback=[default,ea", "callback=[default,early_stopping] callback=[default,early_stopping,"),
        ("callback=[default,ema", "callback=[default,ema] callback=[default,ema,"),
        ("callback=[d", "callback=[default] callback=[default,"),
        ("callback=[default,d", ""),
        ("trainer.max_e", "trainer.max_epochs="),
        ("callback.be", "callback.best."),
        ("callback.best.mon", "callback.best.monitor="),
        ("model.hid", ""),
        ("model.hid model=mlp", "model.hidden_sizes="),
        ("model.drop model=nonsense", "model.dropout="),
        ("~sche", "~scheduler= ~scheduler."),
        ("res", "resume= resume_exact="),
        ("seed=", ""),
        ("choi", ""),
        ("--de", "--describe"),
        ("nothing", ""),
    ],
)
def test_complete(given: str, words: str) -> None:
    assert list(complete(PROJECT, TRAIN, *given.split(), flags=FLAGS)) == words.split()


def test_complete_without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(complete(Project.at(tmp_path), TRAIN, "resume=")) == []


def test_complete_what_only_one_script_takes() -> None:
    assert list(complete(PROJECT, EVALUATE, "ru")) == ["run=", "runs="]
    assert list(complete(PROJECT, EVALUATE, "sp")) == ["split="]
    assert list(complete(PROJECT, TRAIN, "sp")) == []
    assert list(complete(PROJECT, commands()["serve"].usage, "po")) == ["port="]


KEYS = {
    # Control-U empties the line; control-X d writes it to a file.
    "bash": 'bind -x \'"\\C-xd": printf "%s\\n" "$READLINE_LINE" >>lines\'',
    "zsh": 'dump() { print -r -- "$BUFFER" >>lines }; zle -N dump; bindkey -e; bindkey "^Xd" dump; unsetopt LIST_BEEP',
}
START = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}


@contextmanager
def shell(name: str, folder: Path) -> Iterator[Callable[[str], str]]:
    """A shell at a terminal, with completion as the help says; a call gives the line after a TAB."""
    require(name, install=f"apt-get install {name}")
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "dumb", "HOME": str(folder), "HISTFILE": "", "PS1": "> "}
    process = subprocess.Popen(
        START[name], cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    screen = bytearray()

    def wait_for(path: Path, lines: int) -> list[str]:
        """Wait for lines of a file, and for the prompt: keys that are typed before it may be lost."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                screen.extend(os.read(ours, 65536))
            except BlockingIOError:
                time.sleep(0.02)
            shown = re.sub(rb"\x1b\[[?0-9;]*[a-zA-Z]", b"", screen)
            if (
                path.exists()
                and len(found := path.read_text().splitlines()) >= lines
                and (lines > 1 or shown.rstrip().endswith(b">"))
            ):
                return found
        raise AssertionError(f"{name} does not answer: {screen.decode(errors='replace')}")

    def call(line: str) -> str:
        before = len((folder / "lines").read_text().splitlines())
        screen.clear()
        os.write(ours, f"{line}\t".encode())
        os.write(ours, b"\x18d\x15")
        return wait_for(folder / "lines", before + 1)[-1]

    try:
        scripts = f"{ROOT}/scripts/train.py", f"{folder}/a\\ second\\ project/scripts/train.py"
        setup = "".join(f'eval "$({sys.executable} {script} --completion)"; ' for script in scripts)
        setup += f"{KEYS[name]}; echo >>lines\n"
        os.write(ours, setup.encode())
        wait_for(folder / "lines", 1)
        yield call
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_completion_in_a_shell(name: str, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "other.py").write_text("raise SystemExit('never run')\n")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text("from pathlib import Path; Path('was run').touch()\n")
    second = tmp_path / "a second project"
    for file, text in {
        "pyproject.toml": "[tool.boltcutter]\n",
        "scripts/train.py": (ROOT / "scripts" / "train.py").read_text(),
        "configs/model/tiny.yaml": "# A tiny model.\ndefaults: mlp\n",
    }.items():
        (second / file).parent.mkdir(parents=True, exist_ok=True)
        (second / file).write_text(text)
    train, evaluate = f"{ROOT}/scripts/train.py", f"{ROOT}/scripts/evaluate.py"
    with shell(name, tmp_path) as after_tab:
        for line, expected in {
            f"python {train} expe": f"python {train} experiment=",
            f"python {train} model=ml": f"python {train} model=mlp ",
            f"python {train} seed=1 model=ml": f"python {train} seed=1 model=mlp ",
            f"{sys.executable} {train} model=ml": f"{sys.executable} {train} model=mlp ",
            f"torchrun --nproc-per-node 2 {train} model=ml": f"torchrun --nproc-per-node 2 {train} model=mlp ",
            f"python {train} trainer.max_e": f"python {train} trainer.max_epochs=",
            f"python {train} model=mlp model.hid": f"python {train} model=mlp model.hidden_sizes=",
            f"python {train} callback.be": f"python {train} callback.best.",
            f"python {train} callback=[default,em": f"python {train} callback=[default,ema",
            f"python {train} 'callback=[default,em": f"python {train} 'callback=[default,ema",
            f"python {train} resume=ru": f"python {train} resume=runs/",
            f"python {evaluate} run=ru": f"python {evaluate} run=runs/",
            f"python {train} --pri": f"python {train} --print ",
            # A list with descriptions, which are not inserted; zsh also inserts the first candidate.
            f"python {train} model=\t": f"python {train} model={'convnet' if name == 'zsh' else ''}",
            "python a\\ second\\ project/scripts/train.py model=ti": (
                "python a\\ second\\ project/scripts/train.py model=tiny "
            ),
            "boltcutter eva": "boltcutter evaluate ",
            "boltcutter train seed=1 model=ml": "boltcutter train seed=1 model=mlp ",
            # All else is completed as before, and nothing else is run to do so.
            "python oth": "python other.py ",
            "python other.py ru": "python other.py runs/",
            "python other.py model=ru": "python other.py model=runs/",
            "python scripts/train.py ru": "python scripts/train.py runs/",
        }.items():
            if name == "zsh" and line.endswith((" callback=[default,em", "other.py model=ru")):
                continue  # there a person has to quote a [, and nothing is completed after another program's =
            assert after_tab(line).rstrip() == expected.rstrip(), line
    assert not (tmp_path / "was run").exists()


@pytest.mark.parametrize("name", ["bash", pytest.param("zsh", marks=pytest.mark.slow)])
def test_names_of_runs_are_completed_in_a_shell(name: str, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "digits" / "20260101-120000-abcd1234", 0.9)
    train, evaluate = f"{ROOT}/scripts/train.py", f"{ROOT}/scripts/evaluate.py"
    with shell(name, tmp_path) as after_tab:
        for line, ending in {
            f"python {train} resume=lat": "resume=latest",
            f"python {evaluate} run=2026": "run=20260101-120000-abcd1234",
            f"python {evaluate} run=best:test/acc": "run=best:test/accuracy",  # bash splits words at : too
            "boltcutter evaluate run=best:v": "run=best:val/loss",
            "boltcutter runs sta": "status=",
        }.items():
            assert after_tab(line).rstrip() == f"{line.rpartition(' ')[0]} {ending}", line


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_a_tab_executes_and_inserts_no_name_of_somebody_else(name: str, tmp_path: Path) -> None:
    """Neither modules of the working directory nor commands in the names of runs and folders."""
    for run in ("x$(touch touched)", "y`touch touched`", "z;touch touched"):
        write_run(tmp_path / "runs" / "digits" / run, 0.9)
    (tmp_path / "a$(touch touched)" / "inner").mkdir(parents=True)
    for module in ("boltcutter", "json", "torch"):
        (tmp_path / f"{module}.py").write_text("from pathlib import Path; Path('touched').touch()\n")
    train = f"{ROOT}/scripts/train.py"
    with shell(name, tmp_path) as after_tab:
        assert after_tab("boltcutter eva") == "boltcutter evaluate "
        for command in (f"python {train}", "boltcutter evaluate"):
            for run in "xyz":
                assert "touched" not in after_tab(f"{command} run={run}\t")
        assert after_tab(f"python {train} resume=a\t").endswith(r"resume=a\$\(touch\ touched\)/inner/")  # by the shell
    assert not (tmp_path / "touched").exists()


def test_only_plain_candidates_are_offered(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "a-1.b:c[d],é": "text\x1b[31m\nb",
        "a b": "",
        "a$(b)": "",
        "a`b`": "",
        "a;b": "",
        "a\x1b": "",
        "a|b": "",
        "a'": "",
    }
    monkeypatch.setattr(completion, "complete", lambda *_, **__: names)
    print_candidates(PROJECT, TRAIN, ["a"], {})
    assert capsys.readouterr().out == "a-1.b:c[d],é\ttext\\x1b[31m b\n"
