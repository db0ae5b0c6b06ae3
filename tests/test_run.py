import json
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from boltcutter import run
from boltcutter.config import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"


def git(where: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", "-C", str(where), *identity, *words], check=True, capture_output=True, text=True, timeout=20
    ).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    where = tmp_path / "repository"
    where.mkdir()
    git(where, "init", "-q", "-b", "main")
    (where / "known.py").write_text("a = 1\n")
    (where / ".gitignore").write_text("ignored.py\n")
    git(where, "add", "-A")
    git(where, "commit", "-qm", "first")
    return where


def made(tmp_path: Path, *words: str) -> Path:
    cfg = run.read_words(CONFIGS, words)
    cfg.folder = str(tmp_path / "run")
    run.create(cfg)
    return Path(cfg.folder)


def test_take_parts_special_words_from_the_rest() -> None:
    special, rest = run.take(["run=a", "x.run=b", "ckpt=e=3.ckpt", "~y"], "run", "ckpt")
    assert special == {"run": "a", "ckpt": "e=3.ckpt"}
    assert rest == ["x.run=b", "~y"]


def test_a_clean_tree_has_no_patch(repository: Path) -> None:
    state = run.git_state(repository)
    assert state["commit"] == git(repository, "rev-parse", "HEAD").strip()
    assert (state["branch"], state["dirty"], state["patch"]) == ("main", False, "")


def test_the_patch_makes_the_dirty_tree_again(repository: Path, tmp_path: Path) -> None:
    (repository / "known.py").write_text("a = 2\n")
    (repository / "new.py").write_text("b = 3\n")
    (repository / "ignored.py").write_text("secret\n")
    before = git(repository, "status", "--porcelain")
    patch = run.git_state(repository)["patch"]
    assert git(repository, "status", "--porcelain") == before  # the user's index is as it was
    (tmp_path / "patch").write_text(patch)
    git(tmp_path, "clone", "-q", str(repository), "again")
    git(tmp_path / "again", "apply", str(tmp_path / "patch"))
    assert (tmp_path / "again" / "known.py").read_text() == "a = 2\n"
    assert (tmp_path / "again" / "new.py").read_text() == "b = 3\n"
    assert "secret" not in patch


def test_large_new_files_stay_out_of_the_patch(repository: Path) -> None:
    (repository / "weights.bin").write_bytes(b"x" * (run.UNTRACKED_BYTES + 1))
    assert run.git_state(repository)["patch"] == ""


def test_a_password_in_the_remote_is_not_kept(repository: Path) -> None:
    git(repository, "remote", "add", "origin", "https://me:hidden@example.org/x.git")
    assert run.git_state(repository)["remote"] == "https://example.org/x.git"


def test_code_outside_git_has_no_commit(tmp_path: Path) -> None:
    assert run.git_state(tmp_path)["commit"] is None


def test_the_folder_tells_what_made_the_run(tmp_path: Path) -> None:
    folder = made(tmp_path, "seed=7")
    record = json.loads((folder / "record.json").read_text())
    assert record["seed"] == 7
    assert record["packages"]["lightning"]
    assert record["hardware"]["threads"] >= 1
    assert record["config"]["data"]["seed"] == "${seed}"  # references stay, so that an override reaches all of them
    assert OmegaConf.load(folder / "config.yaml").data.seed == 7  # type: ignore[union-attr]


def test_a_run_opens_again_with_new_words(tmp_path: Path) -> None:
    folder = made(tmp_path, "model=mlp", "model.hidden=[5]", "seed=3")
    cfg = run.read_words(CONFIGS, [f"resume={folder}", "trainer.max_epochs=9"])
    assert cfg.model.hidden == [5]
    assert (cfg.data.seed, cfg.trainer.max_epochs, cfg.folder) == (3, 9, str(folder))
    again = run.read_words(CONFIGS, [f"reproduce={folder}", "seed=4"])
    assert (again.data.seed, again.folder, again.reproduce) == (4, None, str(folder))


def test_a_group_can_be_changed_on_the_way(tmp_path: Path) -> None:
    cfg = run.reopen(CONFIGS, made(tmp_path, "trainer=ddp", "trainer.devices=2"), ["trainer=default"])
    assert cfg.trainer.devices == 1
    assert cfg.choices.trainer == "default"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resume=nowhere"], "nowhere: no run there"),
        (["reproduce=nowhere"], "nowhere: no run there"),
        (["resume=a", "reproduce=b"], "exclude each other"),
    ],
)
def test_no_run_is_told_in_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run.read_words(CONFIGS, words)


def test_a_damaged_record_is_told_in_one_line(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (folder / "record.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        run.read_record(folder)


def test_secrets_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "planted" + "-" + "secret"  # in parts, since the patch may hold this file
    monkeypatch.setenv("MY_KEY", secret)
    folder = made(tmp_path, "+data.api_key=${oc.env:MY_KEY}")
    for file in folder.rglob("*"):
        assert not file.is_file() or secret not in file.read_text()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (None, "completed"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(3), "exit 3"),
        (SystemExit(0), "completed"),
        (ValueError("too\nbad"), "ValueError: too bad"),
    ],
)
def test_an_attempt_says_how_it_ended(tmp_path: Path, end: BaseException | None, reason: str) -> None:
    folder = made(tmp_path)

    def go() -> None:
        with run.attempt(folder, writes=True, devices=2):
            assert run.read_record(folder)["attempts"][-1]["reason"] == "running"
            if end:
                raise end

    if end is None:
        go()
    else:
        with pytest.raises(type(end)):
            go()
    (attempt,) = run.read_record(folder)["attempts"]
    assert (attempt["reason"], attempt["devices"]) == (reason, 2)
    assert attempt["start"] <= attempt["end"]


def test_a_killed_attempt_is_closed_by_the_next(tmp_path: Path) -> None:
    folder = made(tmp_path)
    code = f"import os; from boltcutter import run; c = run.attempt(run.Path({str(folder)!r}), writes=True)"
    subprocess.run([sys.executable, "-c", f"{code}\nwith c: os.kill(os.getpid(), 9)"], timeout=60, check=False)
    with run.attempt(folder, writes=True):
        pass
    reasons = [attempt["reason"] for attempt in run.read_record(folder)["attempts"]]
    assert reasons == ["killed", "completed"]


def test_only_one_process_keeps_the_record(tmp_path: Path) -> None:
    folder = made(tmp_path)
    with run.attempt(folder, writes=False):
        pass
    assert run.read_record(folder)["attempts"] == []


def test_differences_are_told_one_by_one(tmp_path: Path) -> None:
    record = run.read_record(made(tmp_path))
    assert run.differences(record) == []
    record["packages"]["torch"] = "0.1"
    record["git"]["commit"] = "abc"
    record["hardware"]["gpus"] = ["H200"]
    record["python"] = "2.7"
    told = " | ".join(run.differences(record))
    for part in ("git checkout abc", "package torch is", "was 0.1", "gpus is [], was ['H200']", "was 2.7"):
        assert part in told


def test_the_log_keeps_what_is_printed_and_the_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def go() -> None:
        with run.keep_log(tmp_path, 3):
            print("hello")
            print("oh", file=sys.stderr)
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        go()
    log = (tmp_path / "logs" / "rank-3.log").read_text()
    assert "hello\noh\n" in log
    assert "RuntimeError: broken" in log
    assert capsys.readouterr().out == "hello\n"
