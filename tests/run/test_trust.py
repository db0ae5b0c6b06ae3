import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICK, Script
from third_party.gallery import overrides

from boltcutter import files
from boltcutter.assembly.overrides import load_run_config
from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError
from boltcutter.environment import user_key
from boltcutter.environment.this_process import this_process
from boltcutter.project import Project
from boltcutter.run import folder, trust

PROJECT = Project.find(__file__)


def test_trust_is_granted_by_an_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_process, "trusts_all", False)
    node = {"_target_": "os.system"}
    assert trust.apply_overrides(["a=1", "trust=True", "b=2"]) == ["a=1", "b=2"]
    assert trust.is_granted()
    trust.check_record(node, "run=x", Path("/nowhere"), runs=True)
    assert trust.apply_overrides(["a=1"]) == ["a=1"]
    assert trust.is_granted()
    assert trust.apply_overrides(["trust=false"]) == []
    assert not trust.is_granted()
    with pytest.raises(ConfigError, match="set trust=true"):
        trust.check_record(node, "run=x", Path("/nowhere"))
    with pytest.raises(ConfigError, match=r"^trust=yes: expected trust=true or trust=false$"):
        trust.apply_overrides(["trust=yes"])


def test_commands_in_a_record_need_a_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_key, "KEY_FILE", tmp_path / "home" / "key")
    node, nowhere = {"setup": ["true"]}, Path("/nowhere")
    trust.check_record(node, "run=x", nowhere)
    trust.check_record(node, "run=x", nowhere, signature=user_key.sign(node), runs=True)
    trust.check_record({"_target_": "os.system"}, "run=x", nowhere, instantiates=False)
    for signature in (None, user_key.sign({"setup": []})):
        with pytest.raises(ConfigError, match=r"^run=x: its record holds .* that you have not signed; set trust=true"):
            trust.check_record(node, "run=x", nowhere, signature=signature, runs=True)
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["key"]


@pytest.mark.parametrize("content", [b"[" * 10**5, b"[]", b"{", b"\xff", b"9" * 5000, None, "fifo", "/dev/zero"])
def test_a_record_that_is_none_ends_in_one_line(tmp_path: Path, content: bytes | str | None) -> None:
    place = tmp_path / "record.json"
    if isinstance(content, bytes):
        place.write_bytes(content)
    elif content is None:
        place.mkdir()
    elif content == "fifo":
        os.mkfifo(place)
    else:
        place.symlink_to(content)
    what = ".*" if isinstance(content, bytes) or content is None else "not an ordinary file"
    with pytest.raises(ConfigError, match=rf"record\.json is damaged \({what}\); restore it from a copy") as error:
        folder.read_record(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"[]," * trust.MAX_LISTS + b"[]", b" " * trust.MAX_JSON], ids=["lists", "bytes"])
def test_a_record_that_would_fill_the_memory_is_not_parsed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "record.json").write_bytes(b'{"a": [' + content + b"]}")
    with pytest.raises(ConfigError, match=r"damaged \(larger than 32 MiB, or more than 1048576 lists and objects\)"):
        folder.read_record(tmp_path)


@pytest.mark.parametrize("kind", [dict, list])
@pytest.mark.parametrize("depth", [60, 900])
def test_a_record_that_is_nested_deeply_ends_in_one_line(tmp_path: Path, kind: type, depth: int) -> None:
    """Although Python can parse it, what reads the configuration would exceed the limit of recursion."""
    node: Any = 1
    for _ in range(depth):
        node = {"a": node} if kind is dict else [node]
    (tmp_path / "record.json").write_text(json.dumps({"config": {"a": node}}))
    with pytest.raises(ConfigError, match=r"record\.json is damaged \(nested too deeply\)"):
        folder.read_record(tmp_path)


@pytest.mark.parametrize("text", [rb"\ud800", rb"\uDBFF", rb"a\udfffb", b"\xed\xa0\x80"])
@pytest.mark.parametrize("place", [b'{"config": {"checkpoints": "%s"}}', b'{"config": {"%s": 1}}', b'{"a": [["%s"]]}'])
def test_a_record_with_half_a_character_is_damaged(tmp_path: Path, place: bytes, text: bytes) -> None:
    """It can be neither a path nor be written."""
    (tmp_path / "record.json").write_bytes(place % text)
    with pytest.raises(ConfigError, match=r"record\.json is damaged \('utf-8' codec .*\); restore it from a copy"):
        folder.read_record(tmp_path)


def test_names_of_files_that_are_not_utf8_and_all_characters_are_read(tmp_path: Path) -> None:
    names = {os.fsdecode(b"a\xff"): ["\U0001f600", "\x00\x1b\u2028"]}
    (tmp_path / "record.json").write_text(json.dumps({"git": names}))
    assert folder.read_record(tmp_path)["git"] == names


def test_a_large_file_is_not_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "record.json", "wb") as file:
        file.truncate(1 << 28)
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="larger than"):
            folder.read_record(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "record",
    [
        *({name: 1} for name in folder.ENTRIES),
        *({"attempts": [1]}, {"attempts": {}}, {"config": []}, {"metrics": ""}),
        *({"attempts": [{"devices": value}]} for value in ("x", [1], -1)),
        *({"attempts": [{"seconds": value}]} for value in ("x", 1e308)),
        {"attempts": [{"resumed_at": {}}]},
    ],
    ids=str,
)
def test_entries_of_another_type_are_damage(tmp_path: Path, record: dict[str, Any]) -> None:
    (tmp_path / "record.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="an entry has another type"):
        folder.read_record(tmp_path)


def test_entries_that_are_null_are_empty(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(json.dumps(dict.fromkeys(folder.ENTRIES)))
    assert folder.read_record(tmp_path) == {name: kind() for name, kind in folder.ENTRIES.items()}
    (tmp_path / "record.json").write_text("{}")
    assert folder.read_record(tmp_path) == {}
    with pytest.raises(ConfigError, match="config is missing"):
        load_run_config(PROJECT, tmp_path)


def test_a_file_that_is_created_is_not_executable(tmp_path: Path) -> None:
    os.close(files.without_blocking(tmp_path / "new", os.O_WRONLY | os.O_CREAT))
    assert (tmp_path / "new").stat().st_mode & 0o111 == 0


def test_a_record_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "record.json").write_text(json.dumps({"a": "x" * 1000}))
    assert folder.read_record(tmp_path)
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    with pytest.raises(ConfigError, match="larger than"):
        folder.read_record(tmp_path)


def test_a_signature_covers_all_values_but_the_place_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_key, "KEY_FILE", tmp_path / "key")
    node = compose(PROJECT, ["launch=slurm"]).written | {"folder": "a", "resume": None, "reproduce": None}
    assert {"data", "task", "trainer", "model", "callback", "checkpoints", "runs", "launch", "seed"} <= node.keys()
    signature = user_key.sign(node)
    assert user_key.is_signed(dict(reversed(node.items())), signature)
    free = {"folder", "resume", "ckpt", "reproduce"}
    for key in node.keys() | free:
        assert user_key.is_signed(node | {key: "changed"}, signature) is (key in free), key
    for key in node.keys() - free:
        assert not user_key.is_signed({name: value for name, value in node.items() if name != key}, signature), key
    nested = {**node, "data": {**node["data"], "folder": "another"}}  # of the data, not of the run
    assert not user_key.is_signed(nested, signature)


def test_a_job_trusts_what_was_submitted_and_nothing_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_key, "KEY_FILE", Path("/proc/nowhere/key"))
    node = {"a": {"_target_": "os.system"}, "folder": "/one"}
    given = ["trust=sha256:" + ",".join(map(user_key.digest, ({"another": "run of an array"}, node)))]
    try:
        assert trust.apply_overrides([*given, "seed=1"]) == ["seed=1"]
        trust.check_record({**node, "folder": "/moved"}, "run=x", tmp_path, PROJECT)
        with pytest.raises(ConfigError, match=r"refers to os\.system"):
            trust.check_record({**node, "seed": 1}, "run=x", tmp_path, PROJECT)
        with pytest.raises(ConfigError, match="expected trust=true or trust=false"):
            trust.apply_overrides(["trust=sha256:0"])
    finally:
        trust.apply_overrides(["trust=false"])
    with pytest.raises(ConfigError, match=r"refers to os\.system"):
        trust.check_record(node, "run=x", tmp_path, PROJECT)


@pytest.mark.parametrize("part", ["record.json", "checkpoints/last.ckpt", "."])
def test_a_signature_counts_only_in_a_folder_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(user_key, "KEY_FILE", tmp_path / "key")
    node = {"_target_": "os.system"}
    signature, run = user_key.sign(node), tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("record.json", "checkpoints/last.ckpt"):
        (run / name).touch()
    trust.check_record(node, "run=x", run, PROJECT, signature=signature)
    (run / part).chmod(0o777)
    with pytest.raises(ConfigError, match=r"you have signed it, but others own or may write .*chmod -R go-w"):
        trust.check_record(node, "run=x", run, PROJECT, signature=signature)


def test_checkpoints_may_be_on_a_larger_disk_to_be_read(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "disk").mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    trust.check_record({}, "run=x", run, PROJECT, walks=True)
    with pytest.raises(ConfigError, match="leads out of it"):
        trust.check_record({}, "run=x", run, PROJECT, walks=True, writes=True)


def test_what_would_be_run_needs_a_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_key, "KEY_FILE", tmp_path / "key")
    node = {"overrides": ["+callback.x._target_=os.system"]}
    with pytest.raises(ConfigError, match=r"that you have not signed; set trust=true"):
        trust.check_record(node, "resume=x", tmp_path, PROJECT, runs=True)
    trust.check_record(node, "resume=x", tmp_path, PROJECT, signature=user_key.sign(node), runs=True)


def test_a_signed_run_is_trusted_until_its_record_changes(script: Script, tmp_path: Path) -> None:
    env = {"PYTHONPATH": "tests"}  # where classes of other packages are
    done = script("train", *QUICK, *overrides("autoencoder"), "test=false", f"folder={tmp_path}/run", env=env)
    assert done.returncode == 0, done.stderr
    for name, verb in (("evaluate", "run"), ("train", "resume")):
        more = ["trainer.max_epochs=3"] if verb == "resume" else []
        done = script(name, f"{verb}={tmp_path}/run", *more, env=env)
        assert done.returncode == 0, done.stderr
    path = tmp_path / "run" / "record.json"
    record = json.loads(path.read_text())
    record["config"]["callback"]["counter"] = {"_target_": "collections.Counter"}
    path.write_text(json.dumps(record))
    arguments = ["--print", f"resume={tmp_path}/run"]
    refused = script("train", *arguments)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "set trust=true" in refused.stderr
    assert "collections.Counter" in script("train", *arguments, "trust=true").stdout
    wrong = script("train", *arguments, "trust=yes")
    assert (wrong.returncode, wrong.stderr) == (2, "error: trust=yes: expected trust=true or trust=false\n")


def test_code_is_put_only_in_a_folder_of_this_user(tmp_path: Path, hand_over: Callable[[Path], None]) -> None:
    (above := tmp_path / "runs").mkdir()
    trust.make_own_folder(place := above / "tries")
    place.rename(tmp_path / "disk")
    place.symlink_to(tmp_path / "disk")
    trust.make_own_folder(place)  # a link of this user leads to a larger disk
    above.chmod(0o777)
    with pytest.raises(ConfigError, match="would be executed"):
        trust.make_own_folder(place)
    above.chmod(0o1777)  # in which nobody can exchange it, as in /tmp
    trust.make_own_folder(place)
    (tmp_path / "disk").chmod(0o777)
    with pytest.raises(ConfigError, match="would be executed"):
        trust.make_own_folder(place)
    (tmp_path / "disk").chmod(0o755)
    hand_over(tmp_path / "disk")
    with pytest.raises(ConfigError, match="would be executed"):
        trust.make_own_folder(place)


@pytest.mark.parametrize("name", ["metrics.csv", "steps.ledger"])
def test_a_table_of_somebody_else_that_would_fill_the_memory_is_refused(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=rf"{name} is larger than (64|256) MiB; set trust=true"):
        trust.check_record({}, "resume=x", tmp_path, PROJECT, walks=True, writes=True)
    if name == "metrics.csv":
        (tmp_path / name).write_bytes(b"a," * (1 << 17) + b"\n")
        with pytest.raises(ConfigError, match=r"metrics\.csv has more columns than can be read"):
            trust.check_record({}, "resume=x", tmp_path, PROJECT, walks=True, writes=True)
        # It is not read for an evaluation.
        trust.check_record({}, "run=x", tmp_path, PROJECT, walks=True)


def test_references_without_number_are_refused_before_they_are_resolved(tmp_path: Path) -> None:
    config = {"name": "a", "checkpoints": "x", "x": {str(number): "${name}" for number in range(30_000)}}
    (tmp_path / "record.json").write_text(json.dumps({"config": config}))
    begin = time.process_time()
    with pytest.raises(ConfigError, match=r"has references which multiply, as in x\.0"):
        folder.read_run_config(Project.find(__file__), tmp_path)
    assert time.process_time() - begin < 5
