import contextlib
import inspect
import json
import os
import pickle
import re
import shlex
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlparse

import pytest
from conftest import mounted, patience, unavailable
from lightning.pytorch.utilities import rank_zero_only
from wandb.proto import wandb_internal_pb2
from wandb_server import GRAPHQL

from boltcutter.logger import wandb as wandb_module
from boltcutter.logger.wandb import WANDB_HOSTS, WandbLogger, base_url, is_reachable, logged_in, resolve_mode

KEY = "5ec7e7" * 6 + "abcd"
PLANTED = "planted-in-the-environment"


class Server:
    """Responds with a status, or like the W&B server.

    Args:
        get: Status of the response to GET; None for no response.
        post: Status of the response to POST; None for no response, "graphql" for that of W&B.
    """

    def __init__(self, get: int | None, post: int | Literal["graphql"] | None) -> None:
        stop = self.stopped = threading.Event()
        seen = self.seen = cast(list[str], [])
        outer = self
        self.unresponsive = False

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.respond(get)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                self.respond(post, body)

            def respond(self, status: int | str | None, body: bytes = b"") -> None:
                seen.append(f"{self.command} {self.path}")
                if self.path == "/stop-responding":
                    outer.unresponsive = True
                elif outer.unresponsive:
                    status = None
                if self.path == "/vanish":
                    threading.Thread(target=outer.close).start()
                if status is None:
                    stop.wait(60)
                    return
                text = json.dumps(GRAPHQL if status == "graphql" and self.path == "/graphql" else {}).encode()
                with contextlib.suppress(ConnectionError):
                    self.send_response(status if isinstance(status, int) else 200)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)

            def log_message(self, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.stopped.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


# Imports once, then forks a process for each run, because importing takes longer than most runs.
RUNS = """
import atexit, contextlib, json, os, sys, time, traceback, urllib.request, warnings
from pathlib import Path
import psutil
from boltcutter.logger import wandb as wandb_module
from boltcutter.logger.wandb import WandbLogger


def main(name, how, folder, env):
    os.setsid()
    os.environ.update(env)
    os.chdir(env["HOME"])
    sys.stdout = sys.stderr = open("printed", "w", buffering=1)
    Path("pid").write_text(str(os.getpid()))
    warned = []
    warnings.showwarning = lambda message, *rest: warned.append(str(message))
    logger = WandbLogger(folder=Path(folder), project="p", best={"val/loss": "min", "val/accuracy": "max"})
    began = time.monotonic()
    run = logger.experiment
    seconds = time.monotonic() - began
    where, offline, disabled = logger.location, run.offline, run.disabled
    logger.log_hyperparams({"lr": 0.1, "api_key": "***"})
    more = {f"m{i}": 1.0 for i in range(200)} if how == "full" else {}  # more than fits into the last page of a file
    if how == "full":
        wandb_module.TIMEOUT = 2.0
    for step in range(10_000 if how == "killed" else 10):
        logger.log_metrics({"val/loss": abs(step - 5), "val/accuracy": step / 10, "train/loss": 1.0} | more, step)
        if how == "full" and 4 <= step < 9:
            time.sleep(2.5)
            filler = Path(folder).parents[1] / "filler"
            if step == 4:
                with contextlib.suppress(OSError):
                    filler.write_bytes(bytes(2**25))
        if how == "killed":
            print(time.time(), step)
            time.sleep(0.02)
        if how == "service dies" and step == 4:
            for child in psutil.Process().children():
                if "wandb-core" in " ".join(child.cmdline()):
                    child.kill()
                    child.wait(10)
        if how == "unresponsive" and step == 4:
            urllib.request.urlopen(env["WANDB_BASE_URL"] + "/stop-responding").close()
        if how == "vanished" and step == 4:
            urllib.request.urlopen(env["WANDB_BASE_URL"] + "/vanish").close()
            time.sleep(0.5)
    began = time.monotonic()
    logger.close(3)
    closing = time.monotonic() - began
    if how == "resumed":
        logger = WandbLogger(folder=Path(folder), project="p")
        logger.log_metrics({"train/loss": 0.5}, 10)
        logger.close(0)
    modes = {"location": where, "offline": offline, "disabled": disabled}
    return {"seconds": seconds, "closing": closing, "warned": warned} | modes


for run in json.loads(Path('runs.json').read_text()):
    if os.fork() == 0:
        try:
            result = main(**run)
        except BaseException:
            result = {"error": traceback.format_exc()}
        Path(run["env"]["HOME"], "draft").write_text(json.dumps(result))
        Path(run["env"]["HOME"], "draft").rename(Path(run["env"]["HOME"], "result"))
        atexit._run_exitfuncs()
        os._exit(0)  # unloading all modules takes seconds
try:
    while True:
        os.wait()
except ChildProcessError:
    pass
"""


class Runs:
    """Processes that log to W&B, started together, each with its own home and no login."""

    def __init__(self, root: Path, runs: dict[str, dict[str, str]]) -> None:
        self.root, self.names = root, list(runs)
        for name in runs:
            (root / name).mkdir(exist_ok=True)
        given = [
            {"name": name, "how": name, "folder": str(self.folder(name)), "env": env | {"HOME": str(root / name)}}
            for name, env in runs.items()
        ]
        env = {"PATH": os.environ["PATH"], "HOME": str(root), "OMP_NUM_THREADS": "1", "PLANTED": PLANTED}
        (root / "runs.json").write_text(json.dumps(given))
        self.process = subprocess.Popen([sys.executable, "-c", RUNS], env=env, cwd=root)

    def folder(self, name: str) -> Path:
        return self.root / name / "runs" / "name" / "first"

    def wait_for(self, name: str, file: str, lines: int = 0) -> str:
        path, deadline = self.root / name / file, time.monotonic() + patience(100)
        while not path.is_file() or path.read_text().count("\n") < lines:
            assert time.monotonic() < deadline, f"{name}: no {file}"
            time.sleep(0.05)
        return path.read_text()

    def result(self, name: str) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.wait_for(name, "result"))
        assert "error" not in result, result["error"]
        return result

    def kill(self, name: str) -> None:
        pid = self.root / name / "pid"
        if pid.is_file():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid.read_text()), signal.SIGKILL)

    def close(self) -> None:
        for name in self.names:
            if not (self.root / name / "result").is_file():
                self.kill(name)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    made = {
        "broken": Server(500, 500),
        "forbids": Server(401, 401),
        "silent": Server(200, None),
        "wandb": Server(200, "graphql"),
        "unwanted": Server(200, 200),
        "vanished": Server(200, "graphql"),
        "unresponsive": Server(200, "graphql"),
    }
    yield made
    for server in made.values():
        if not server.stopped.is_set():
            server.close()


@pytest.fixture(scope="module")
def black_hole() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as hole:  # the kernel accepts, but nothing responds
        yield f"http://127.0.0.1:{hole.getsockname()[1]}"


@pytest.fixture(scope="module")
def refused() -> str:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"http://127.0.0.1:{closed.getsockname()[1]}"


def read_by(tests: list[pytest.Item]) -> set[str]:
    """Return the names of the runs that these tests read: their parameters, or what their code names."""
    found = set[str]()
    for test in tests:
        if isinstance(test, pytest.Function) and test.path == Path(__file__):
            named = re.findall(r'runs\.\w+\("([\w ]+)"', inspect.getsource(test.function))
            found |= {str(value) for value in test.callspec.params.values()} if hasattr(test, "callspec") else {*named}
    return found


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
    servers: dict[str, Server],
    black_hole: str,
    refused: str,
) -> Iterator[Runs]:
    def at(url: str) -> dict[str, str]:
        return {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": url}

    named = {
        name: at(servers[name].url) for name in ("silent", "broken", "forbids", "wandb", "vanished", "unresponsive")
    }
    nowhere = {"black hole": at(black_hole), "refused": at(refused), "no name": at("https://no.such.host.invalid")}
    modes = {mode: at(servers["unwanted"].url) | {"WANDB_MODE": mode} for mode in ("disabled", "offline")}
    offline: dict[str, dict[str, str]] = {name: {} for name in ("logged out", "resumed", "service dies", "killed")}
    root = tmp_path_factory.mktemp("wandb")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # where nothing can be mounted
            stack.enter_context(mounted(root / "full" / "runs", "16m"))
            offline["full"] = {}
        used = read_by(request.session.items)
        made = Runs(root, {n: env for n, env in (named | nowhere | modes | offline).items() if n in used})
        stack.callback(made.close)
        yield made


def records(folder: Path) -> list[Any]:
    """Records of all .wandb files of a run, in order; they are LevelDB logs."""
    found = []
    for file in sorted((folder / "wandb").glob("*run-*/*.wandb")):
        data, at, body = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:  # the rest of a block is too short for a header
                at += 32768 - at % 32768
                continue
            crc, length, kind = struct.unpack("<IHB", data[at : at + 7])
            part = data[at + 7 : at + 7 + length]
            if zlib.crc32(part, zlib.crc32(bytes([kind]))) != crc:  # cut off by a kill
                break
            body = part if kind in (1, 2) else body + part
            if kind in (1, 4):
                found.append(wandb_internal_pb2.Record.FromString(body))
            at += 7 + length
    return found


def history(folder: Path) -> list[dict[str, Any]]:
    rows = [record.history.item for record in records(folder) if record.WhichOneof("record_type") == "history"]
    return [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


def files(folder: Path) -> Iterator[bytes]:
    for file in folder.rglob("*"):
        if file.is_file():
            yield file.read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_without_a_login_is_offline(runs: Runs) -> None:
    result, folder = runs.result("logged out"), runs.folder("logged out")
    assert result["offline"]
    assert not result["warned"]
    assert result["location"] == f"offline; boltcutter sync {shlex.quote(f'run={folder}')}"
    assert [row["trainer/global_step"] for row in history(folder)] == list(range(10))
    assert [row["val/loss"] for row in history(folder)] == [abs(step - 5) for step in range(10)]
    (run,) = (record.run for record in records(folder) if record.WhichOneof("record_type") == "run")
    assert (run.run_id, run.display_name, run.project) == ("first", "name/first", "p")
    assert [record.exit.exit_code for record in records(folder) if record.WhichOneof("record_type") == "exit"] == [3]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_summary_shows_the_best_value(runs: Runs) -> None:
    runs.result("logged out")
    metrics = [record.metric for record in records(runs.folder("logged out")) if record.HasField("metric")]
    best = {m.name: (m.summary.min, m.summary.max) for m in metrics if m.summary.min or m.summary.max}
    assert best == {"val/loss": (True, False), "val/accuracy": (False, True)}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["forbids", "black hole", "refused", "no name", "broken", "silent"])
def test_a_failing_server_neither_stops_nor_delays_a_run(runs: Runs, name: str) -> None:
    result = runs.result(name)
    assert result["offline"]
    assert result["seconds"] < 45  # with several runs at once; W&B alone waits for 110 s
    (warned,) = result["warned"]
    assert re.fullmatch(r"W&B: .*offline.*boltcutter sync.*", warned)
    pid, deadline = int(runs.wait_for(name, "pid")), time.monotonic() + 8
    while Path(f"/proc/{pid}").exists() and sys.platform == "linux":
        assert time.monotonic() < deadline, "the process does not end"
        time.sleep(0.05)
    while len(history(runs.folder(name))) < 10 and time.monotonic() < deadline + 8:  # W&B's own process writes it
        time.sleep(0.1)
    assert len(history(runs.folder(name))) == 10


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_run_with_a_login_is_online(runs: Runs, servers: dict[str, Server]) -> None:
    result = runs.result("wandb")
    assert not result["offline"]
    assert result["location"] == f"{servers['wandb'].url}/me/p/runs/first"
    assert any(request.endswith("/first/file_stream") for request in servers["wandb"].seen)
    assert not result["warned"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_server_that_disappears_does_not_stop_a_run(runs: Runs) -> None:
    result = runs.result("vanished")
    assert not result["offline"]
    assert result["closing"] < 30
    assert len(history(runs.folder("vanished"))) == 10


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_server_that_stops_responding_does_not_delay_the_end(runs: Runs) -> None:
    result = runs.result("unresponsive")
    assert not result["offline"]
    assert result["closing"] < 15  # W&B alone would retry for 20 seconds or more
    (warned,) = result["warned"]
    assert "unreachable" in warned
    found = records(runs.folder("unresponsive"))
    assert len(history(runs.folder("unresponsive"))) == 10
    assert [record.exit.exit_code for record in found if record.HasField("exit")] == [3]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["disabled", "offline"])
def test_the_environment_sets_the_mode(runs: Runs, servers: dict[str, Server], mode: str) -> None:
    result = runs.result(mode)
    assert result[mode]
    assert result["location"].startswith(mode)
    assert bool(list(runs.folder(mode).rglob("*.wandb"))) == (mode == "offline")
    assert not servers["unwanted"].seen


@pytest.mark.timeout(120)
def test_a_resumed_run_has_the_same_id(runs: Runs) -> None:
    runs.result("resumed")
    found = records(runs.folder("resumed"))
    assert [record.run.run_id for record in found if record.HasField("run")] == ["first", "first"]
    assert [record.exit.exit_code for record in found if record.HasField("exit")] == [3, 0]
    assert [row["trainer/global_step"] for row in history(runs.folder("resumed"))] == list(range(11))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", ["logged out", "wandb", *(pytest.param(name, marks=pytest.mark.slow) for name in ("silent", "broken"))]
)
def test_secrets_of_the_environment_are_not_written(runs: Runs, name: str) -> None:
    runs.result(name)
    kept = list(files(runs.folder(name)))
    assert any(b"train/loss" in file for file in kept)
    assert not any(secret.encode() in file for secret in (KEY, PLANTED) for file in kept)


@pytest.mark.timeout(120)
def test_a_run_survives_the_death_of_the_wandb_service(runs: Runs) -> None:
    (warned,) = runs.result("service dies")["warned"]
    assert re.fullmatch(r"W&B: its process has died \(.*\); continuing disabled, run boltcutter sync later", warned)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_full_disk_warns_once_and_is_survived(runs: Runs) -> None:
    if "full" not in runs.names:
        unavailable("no disk can be mounted on this machine")
    result, folder = runs.result("full"), runs.folder("full")
    (full,) = result["warned"]
    assert re.fullmatch(r"W&B: .*/run-first\.wandb does not grow, .*", full)
    assert [row["trainer/global_step"] for row in history(folder)][:5] == [0, 1, 2, 3, 4]
    assert result["closing"] < 30


@pytest.mark.timeout(120)
def test_a_killed_run_loses_about_a_second(runs: Runs) -> None:
    runs.wait_for("killed", "printed", lines=150)
    runs.kill("killed")
    killed = time.time()
    logged = [float(line.split()[0]) for line in (runs.root / "killed" / "printed").read_text().splitlines()]
    kept = [row["trainer/global_step"] for row in history(runs.folder("killed"))]
    assert kept == list(range(len(kept)))
    assert killed - logged[kept[-1]] < 3


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without a login."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def netrc(file: Path, machine: str) -> Path:
    file.write_text(f"machine {machine}\n  login user\n  password {KEY}\n")
    return file


def test_logins_are_found_in_environment_or_netrc(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not logged_in()
    netrc(home / ".netrc", "elsewhere.org")
    assert not logged_in()
    for server in WANDB_HOSTS:
        netrc(home / ".netrc", server)
        assert logged_in()
    (home / ".netrc").write_text("machine\n\n\\ nonsense")
    assert not logged_in()
    monkeypatch.setenv("NETRC", str(netrc(home / "other", "api.wandb.ai")))
    assert logged_in()
    monkeypatch.delenv("NETRC")
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.setenv(name, KEY)
        assert logged_in()
        monkeypatch.delenv(name)
    assert not logged_in()


def test_the_server_is_taken_from_environment_or_login(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert urlparse(base_url()).netloc in WANDB_HOSTS
    settings = home / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = http://own.server:8080\n")
    assert base_url() == "http://own.server:8080"
    netrc(home / ".netrc", "own.server:8080")
    assert logged_in()
    settings.write_text("[default\nnonsense")
    assert urlparse(base_url()).netloc in WANDB_HOSTS
    monkeypatch.setenv("WANDB_BASE_URL", "http://third.server")
    assert base_url() == "http://third.server"


def test_the_mode_depends_on_login_and_server(
    home: Path, monkeypatch: pytest.MonkeyPatch, servers: dict[str, Server], refused: str
) -> None:
    assert resolve_mode("auto") == "offline"
    assert resolve_mode("disabled") == "disabled"
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", servers["wandb"].url)
    assert resolve_mode("auto") == resolve_mode("online") == "online"
    assert resolve_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert (resolve_mode("auto"), resolve_mode("online"), resolve_mode("disabled")) == ("offline", "online", "disabled")
    monkeypatch.setenv("WANDB_MODE", "")
    assert resolve_mode("auto") == "online"
    monkeypatch.setenv("WANDB_BASE_URL", refused)
    with pytest.warns(UserWarning, match=rf"^W&B: {refused} .*offline.*boltcutter sync"):
        assert resolve_mode("online") == "offline"


def timed(call: Callable[[], bool]) -> tuple[bool, float]:
    began = time.monotonic()
    return call(), time.monotonic() - began


def test_any_response_counts_as_reachable(servers: dict[str, Server], refused: str) -> None:
    for name in ("broken", "forbids", "wandb"):
        assert is_reachable(servers[name].url)
    assert not is_reachable("nonsense")
    found, seconds = timed(lambda: is_reachable(refused))
    assert not found
    assert seconds < 4  # of the 5 that a request waits


def test_a_missing_response_times_out(black_hole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_module, "TIMEOUT", 0.3)
    found, seconds = timed(lambda: is_reachable(black_hole))
    assert not found
    assert seconds < 4  # of the 5 that a request waits


def test_a_certificate_unknown_to_python_counts_as_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **kwargs: Any) -> None:
        raise wandb_module.urllib.error.URLError(ssl.SSLCertVerificationError("unknown authority"))

    monkeypatch.setattr(wandb_module.urllib.request, "urlopen", unknown)
    assert is_reachable("https://own.server")


def test_name_and_group_are_arguments_and_the_folder_is_not(tmp_path: Path) -> None:
    made = WandbLogger(
        folder=tmp_path / "digits-mlp" / "a", project="p", mode="offline", name="first", group="ablation"
    )
    assert (made.name, made._wandb_init["name"], made._wandb_init["group"]) == ("p", "first", "ablation")
    with pytest.raises(ValueError, match="save_dir: set by folder"):
        WandbLogger(folder=tmp_path / "digits-mlp" / "a", project="p", save_dir=str(tmp_path))


def test_online_requires_a_login(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"folder": home / "runs" / "name" / "first", "project": "p"}
    with pytest.raises(ValueError, match=r"^mode=online.*; run `wandb login`"):
        WandbLogger(mode="online", **options)
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ValueError, match=r"^WANDB_MODE=online.*; run `wandb login`"):
        WandbLogger(**options)
    WandbLogger(mode="offline", **options)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    WandbLogger(**options)  # rank 0 may be on another machine
    assert not (home / "runs").exists()


def test_a_run_ended_by_a_signal_is_marked_preempted(tmp_path: Path) -> None:
    logger = WandbLogger(folder=tmp_path / "run", project="p", mode="offline")
    logger.log_metrics({"a": 1.0}, step=0)
    logger.close(143)
    end = time.monotonic() + 20  # W&B's own process writes
    while "preempting" not in [record.WhichOneof("record_type") for record in records(tmp_path / "run")]:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_pickled_logger_starts_the_run_in_the_other_process(tmp_path: Path) -> None:
    logger = WandbLogger(folder=tmp_path / "run", project="p", mode="offline")
    copy = pickle.loads(pickle.dumps(logger))
    assert not (tmp_path / "run").exists()
    copy.log_metrics({"a": 1.0}, step=0)
    copy.close(0)
    end = time.monotonic() + 20  # W&B's own process writes
    while "history" not in [record.WhichOneof("record_type") for record in records(tmp_path / "run")]:
        assert time.monotonic() < end
        time.sleep(0.05)
    logger.close(0)  # no run was started here
