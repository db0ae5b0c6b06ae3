import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import fsspec
import pytest
import torch
from conftest import QUICK, Script, assert_same, assert_same_history, environment, saved_weights
from forkserver import Forked, ForkServer, rank_variables
from object_storage import Gate, google_storage, names
from PIL import Image

from boltcutter.checkpoint import sharded_checkpoint
from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.checkpoint.load import find_damage, load_checkpoint
from boltcutter.checkpoint.storage import CheckpointError
from boltcutter.config.errors import ConfigError
from boltcutter.run.remote import store as remote
from boltcutter.run.remote.store import run_store
from boltcutter.run.remote.transfer import fetch, publish

STORE = run_store()

SETTINGS = [*QUICK, "report=true", "model=mlp", "trainer.max_epochs=4"]


def wait_for_checkpoint(process: Forked, url: str) -> None:
    """Wait for the first checkpoint of a run at a URL."""
    store, place = fsspec.url_to_fs(f"{url}/checkpoints/last.ckpt")
    end = time.monotonic() + 90
    while not store.exists(place):
        store.invalidate_cache()
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def untouched(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in a folder."""
    folder = tmp_path_factory.mktemp("untouched") / "run"
    done = script("train", *SETTINGS, f"folder={folder}")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def google_variables() -> Iterator[dict[str, str]]:
    """Variables of a server of Cloud Storage."""
    with google_storage() as variables:
        yield variables | {"NO_GCE_CHECK": "true"}


@pytest.mark.parametrize(
    ("protocol", "number"),
    [
        ("s3", signal.SIGTERM),
        pytest.param("s3", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("gs", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_resumes_on_another_machine(
    forks: ForkServer,
    script: Script,
    bucket: str,
    google_variables: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    untouched: Path,
    protocol: str,
    number: signal.Signals,
) -> None:
    for name, value in google_variables.items():
        monkeypatch.setenv(name, value)
    url = f"{bucket}/runs/name/1".replace("s3:", f"{protocol}:")
    first = environment(BOLTCUTTER_SCRATCH=str(tmp_path / "first"))
    with forks.start(["scripts/train.py", *SETTINGS, f"folder={url}"], first, 2, 2) as process:
        wait_for_checkpoint(process, url)
        process.send_signal(number)
        assert process.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
    second = {"BOLTCUTTER_SCRATCH": str(tmp_path / "second")}
    resumed = script("train", f"resume={url}", env=second)
    assert resumed.returncode == 0, resumed.stderr
    copy = tmp_path / "copy"
    assert "report.html" in fetch(url, copy)
    assert_same(untouched, copy)
    assert_same_history(untouched, copy)
    record = json.loads((copy / "record.json").read_text())
    assert [attempt["reason"] for attempt in record["attempts"]][1:] == ["completed"]
    assert (record["config"]["folder"], record["config"]["checkpoints"]) == (url, "${folder}/checkpoints")
    assert not any(str(tmp_path) in path.read_text() for path in (copy / "config.yaml", copy / "record.json"))
    compared = script("compare", f"run={url}", f"with={untouched}", env=second)
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert "bitwise identical" in compared.stdout


def run_nodes(
    forks: ForkServer, folder: Path, *overrides: str, ends: Callable[[Forked], None] = lambda process: None
) -> list[str]:
    """Train on two nodes with a process each, which share no folder; returns what they print."""
    outputs = [folder.with_name(f"{folder.name}-{rank}.txt") for rank in range(2)]
    with ExitStack() as stack:
        processes = []
        for rank, variables in enumerate(rank_variables(2)):
            node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": str(rank), "GROUP_RANK": str(rank)}
            scratch = {"BOLTCUTTER_SCRATCH": str(folder.with_name(f"{folder.name}-{rank}"))}
            output = stack.enter_context(open(outputs[rank], "wb")).fileno()
            env = environment(**variables | node | scratch)
            processes.append(stack.enter_context(forks.start(["scripts/train.py", *overrides], env, output, output)))
        ends(processes[0])
        codes = [process.wait(60) for process in processes]
    texts = [output.read_text() for output in outputs]
    assert codes == [0, 0] or ends.__name__ != "<lambda>", texts
    return texts


@pytest.mark.slow
def test_nodes_without_a_shared_folder(forks: ForkServer, script: Script, bucket: str, tmp_path: Path) -> None:
    settings = [*SETTINGS, "trainer=ddp", "trainer.accelerator=cpu", "trainer.num_nodes=2", "trainer.devices=1"]
    url = f"{bucket}/run"

    def preempt(process: Forked) -> None:
        wait_for_checkpoint(process, url)
        process.send_signal(signal.SIGTERM)

    run_nodes(forks, tmp_path / "first", *settings, f"folder={url}", ends=preempt)
    texts = run_nodes(forks, tmp_path / "second", f"resume={url}")
    assert f"resume={url} trainer.max_epochs=<more>" in texts[0]
    fetch(url, tmp_path / "run")
    done = script("train", *settings[:-2], "trainer.devices=2", f"folder={tmp_path}/untouched", ranks=2)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "untouched", tmp_path / "run")
    assert_same_history(tmp_path / "untouched", tmp_path / "run")
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert list((tmp_path / "second-1").rglob("metrics.csv"))  # as it was when the second attempt started
    assert not list((tmp_path / "second-1").rglob("test/metrics.json"))


def test_the_local_folder_must_be_writable_and_own(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BOLTCUTTER_SCRATCH", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=rf"^BOLTCUTTER_SCRATCH={tmp_path}/file: .* cannot be created \(.*; set "):
        STORE.pull(place, "run")
    monkeypatch.setenv("BOLTCUTTER_SCRATCH", str(tmp_path))
    STORE.pull(place, "run")
    monkeypatch.setattr(os, "getuid", lambda: -1)
    with pytest.raises(ConfigError, match=rf"^BOLTCUTTER_SCRATCH={tmp_path}: .* belongs to another user; set "):
        STORE.pull(place, "run")


@pytest.mark.slow
def test_nodes_but_the_first_upload_only_their_logs(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_RANK", "1")
    folder = STORE.pull(place, "folder")
    with STORE.mirrored(folder):
        for name in ("record.json", "logs/rank-1.log"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
    assert names(place) == {"logs/rank-1.log"}
    monkeypatch.setenv("LOCAL_RANK", "1")
    with STORE.mirrored(folder):
        (folder / "logs" / "rank-2.log").write_text("")
    assert names(place) == {"logs/rank-1.log"}


def test_a_process_of_the_same_node_keeps_files_that_another_one_uses(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "record.json").write_text("1")
    publish(tmp_path, place, ["record.json"])
    file = STORE.pull(place, "run") / "record.json"
    (tmp_path / "record.json").write_text("2")
    publish(tmp_path, place, ["record.json"])
    first, second = remote._locks, dict[Path, int]()
    monkeypatch.setattr(remote, "_locks", second)  # as in another process
    STORE.pull(place, "run")
    assert file.read_text() == "1"
    for lock in second.values():
        os.close(lock)
    monkeypatch.setattr(remote, "_locks", first)
    STORE.pull(place, "run")
    assert file.read_text() == "2"
    file.write_text("3")  # not yet uploaded when a process was killed
    STORE.pull(place, "run")
    assert file.read_text() == "3"
    STORE.push(file.parent)
    (tmp_path / "metrics.csv").write_text("")
    publish(tmp_path, place, ["metrics.csv"])
    store, path = fsspec.url_to_fs(f"{place}/record.json")
    assert store.cat_file(path) == b"3"
    store.rm_file(path)
    STORE.pull(place, "run")
    assert [path.name for path in file.parent.iterdir()] == ["metrics.csv"]


@pytest.mark.slow
def test_training_goes_on_while_the_storage_cannot_be_reached(forks: ForkServer, bucket: str, tmp_path: Path) -> None:
    url, errors = f"{bucket}/run", tmp_path / "errors"
    settings = [*QUICK, "model=linear", "test=false", "trainer.max_epochs=100000", f"folder={url}"]
    with Gate(os.environ["AWS_ENDPOINT_URL"]) as gate, open(errors, "wb") as file:
        env = environment(BOLTCUTTER_SCRATCH=str(tmp_path), AWS_ENDPOINT_URL=f"http://127.0.0.1:{gate.port}")
        with forks.start(["scripts/train.py", *settings], env, file.fileno(), file.fileno()) as process:
            wait_for_checkpoint(process, url)
            gate.close()
            time.sleep(50)
            gate.open()
            time.sleep(30)
            assert process.poll() is None, errors.read_text()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143
    assert "last-preempted.ckpt" in "".join(names(url))
    assert "Traceback" not in errors.read_text()
    assert 1 <= errors.read_text().count("warning: ") <= 3


@pytest.mark.slow
def test_a_second_training_at_the_url_is_refused(
    forks: ForkServer, script: Script, bucket: str, tmp_path: Path
) -> None:
    url = f"{bucket}/run"
    settings = [*QUICK, "model=linear", "test=false", "trainer.max_epochs=100000", f"folder={url}"]
    env = {"BOLTCUTTER_SCRATCH": str(tmp_path / "first")}
    with forks.start(["scripts/train.py", *settings], environment(**env), 2, 2) as process:
        wait_for_checkpoint(process, url)
        for name in ("first", "second"):
            done = script("train", f"resume={url}", env={"BOLTCUTTER_SCRATCH": str(tmp_path / name)})
            assert done.returncode == 2
            assert done.stderr.startswith(f"error: resume={url}: in use by process {process.pid} on ")
            assert done.stderr.count("\n") == 1
        store, path = fsspec.url_to_fs(f"{url}/.lease")
        taken = json.loads(store.cat_file(path)) | {"host": "other-host", "token": "x"}
        store.pipe_file(path, json.dumps(taken).encode())
        assert process.wait(30) == 1
    assert json.loads(store.cat_file(path)) == taken


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("folder=s3://no-bucket/run", "cannot be reached (The specified bucket does not exist); check the address"),
        ("runs=memory://runs", "memory is lost when the process ends; use s3://, gs:// or az://"),
        ("resume=s3://bucket/nothing", "no run there (record.json is missing); give the folder of a run"),
        (
            "folder=s3://bucket/run trainer=fsdp trainer.strategy.state_dict_type=sharded",
            "trainer.strategy.state_dict_type=sharded: shards need a folder that all ranks can access, not ",
        ),
        (
            "checkpoints=s3://bucket/run trainer.strategy=deepspeed_stage_3",
            "trainer.strategy=deepspeed_stage_3: shards need a folder that all ranks can access, not s3://bucket/run;",
        ),
        ("folder=s4://bucket/run", "cannot be reached (Protocol not known: s4); use s3://, gs:// or az://"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    script: Script, bucket: str, tmp_path: Path, override: str, message: str
) -> None:
    done = script("train", *QUICK, *override.split(), env={"BOLTCUTTER_SCRATCH": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message if message.startswith('trainer') else override}")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_commands_that_need_a_folder_refuse_urls(script: Script) -> None:
    for name, overrides in (("search", ["search=random"]), ("launch", ["launch=local", "trainer.devices=1"])):
        for setting in ("runs", "folder"):
            done = script(name, *overrides, f"{setting}=s3://bucket/runs", "--check")
            assert done.returncode == 2
            assert done.stderr.startswith(f"error: {setting}=s3://bucket/runs: ")
            assert done.stderr.endswith(f"; set {setting} to a folder\n")
            assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_run_is_evaluated_and_reproduced_by_url(script: Script, bucket: str, tmp_path: Path, untouched: Path) -> None:
    url, env = f"{bucket}/run", {"BOLTCUTTER_SCRATCH": str(tmp_path / "scratch")}
    publish(untouched, url, [str(file.relative_to(untouched)) for file in untouched.rglob("*") if file.is_file()])
    done = script("evaluate", f"run={url}", "split=val", env=env)
    assert done.returncode == 0, done.stderr
    assert f"output        {url}/evaluation/val" in done.stdout
    for key, flag in (("resume", "--print"), ("resume", "--describe"), ("resume", "--check"), ("reproduce", "--check")):
        done = script("train", f"{key}={url}", flag, env=env)
        assert done.returncode == 0, done.stderr
        assert flag != "--print" or f"folder: {url}\n" in done.stdout
    image = tmp_path / "image.png"
    Image.new("L", (8, 8)).save(image)
    done = script("predict", f"run={url}", f"input={image}", env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"1 predictions: {url}/predictions.csv\n"
    assert {"evaluation/val/metrics.json", "predictions.csv"} <= names(url)
    done = script("train", f"reproduce={url}", f"folder={url}-again", env=env)
    assert done.returncode == 0, done.stderr
    assert f"metrics equal those of {url}\n" in done.stdout
    assert "checkpoints/last.ckpt" in names(f"{url}-again")


@pytest.mark.slow
def test_sharded_checkpoints_are_at_the_url(
    script: Script, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*QUICK, "model=mlp", "test=false"]
    shards = ["trainer=fsdp2", "trainer.devices=2", "trainer.strategy.save_distributed_checkpoint=true"]
    for overrides in (
        [*settings, "trainer.max_epochs=1", f"folder={tmp_path / 'alone'}"],
        [f"resume={tmp_path / 'alone'}", "trainer.max_epochs=2"],
    ):
        alone = script("train", *overrides)
        assert alone.returncode == 0, alone.stderr
    for machine, overrides in (
        ("first", [*settings, *shards, "trainer.max_epochs=1", f"folder={bucket}"]),
        ("second", [f"resume={bucket}", "trainer.max_epochs=2"]),
    ):
        scratch = tmp_path / machine
        scratch.mkdir()
        env = {"BOLTCUTTER_SCRATCH": str(scratch / "runs"), "TMPDIR": str(scratch)}
        done = script("train", *overrides, ranks=2, env=env)
        assert done.returncode == 0, done.stderr
        assert [file for file in scratch.iterdir() if file.is_dir()] == [scratch / "runs"]
    last = f"{bucket}/checkpoints/last.ckpt"
    found = load_checkpoint(last)
    torch.testing.assert_close(dict(found["state_dict"]), saved_weights(tmp_path / "alone"), rtol=0, atol=1e-6)
    shards = sorted(name for name in names(f"{bucket}/checkpoints") if name.startswith("last.ckpt.shards-"))
    assert [name.rpartition("/")[2] for name in shards] == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    store, place = fsspec.url_to_fs(f"{bucket}/checkpoints/{shards[2]}")
    store.pipe_file(place, bytes(store.size(place)))
    monkeypatch.setattr(sharded_checkpoint, "_copies", {})
    with pytest.raises(CheckpointError, match=f"its shard {shards[2].removeprefix('checkpoints/')} is damaged"):
        load_checkpoint(last)
    assert find_damage(last) is None  # only its size is known before
    store.rm_file(place)
    assert find_damage(last) == f"its shard {shards[2]} is missing"
    files = AtomicCheckpointIO()
    files.permit_removal(last)
    files.remove_checkpoint(last)
    assert not [name for name in names(f"{bucket}/checkpoints") if name.startswith("last.ckpt")]
