"""Start commands without the time for imports, by forking a process that has imported all modules.

``python tests/forkserver.py <fd>`` is the server. It has no threads, so that it can be forked safely. For each request
it forks a child that behaves as ``python <script> <overrides>``, with the given environment, working directory and
files, in a new session, with its own exit status and ``atexit`` handlers. The server ends, and kills its children, when
the other end of its socket, ``ForkServer``, is closed.

Environment variables that are read by imports cannot be changed: see ``fits``.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
READ_AT_IMPORT = ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "TORCH", "PYTORCH_", "CUDA_", "PYTHON", "WANDB_")
READ_AT_IMPORT += ("LD_", "LC_", "LANG", "MPL", "HOME", "XDG_", "TZ")
READ_LATER = ("TORCHELASTIC_", "PYTHONPATH")

# Modules that are imported lazily; those of extras may not be installed.
LATE = ["PIL.JpegImagePlugin", "s3fs", "sklearn.datasets", "sklearn.model_selection"]
LATE += ["torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook", "torch.utils.serialization.config"]
LATE += ["torch.utils.tensorboard", "wandb.apis.public", "wandb.sdk.launch"]


class ForkServer:
    """Client of the fork server; must be closed.

    Args:
        env: Environment variables of the server.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = dict(env)
        self._socket, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                cwd=ROOT,
                env=self.env | {"JE_ARROW_MALLOC_CONF": "background_thread:false"},  # pyarrow would start a thread
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
            theirs.close()
            ready = self._socket.recv(1)
            log.seek(0)
            text = log.read().decode()
        if ready != b"r" or text:  # also for import warnings, which children would not repeat
            self.close()
            raise RuntimeError(f"the fork server printed during imports:\n{text}")

    @property
    def pid(self) -> int:
        """The process ID of the server."""
        return self._process.pid

    def fits(self, env: Mapping[str, str]) -> bool:
        """Return whether a fork with ``env`` behaves as a new process with ``env``."""
        return not self.differing(env)

    def differing(self, env: Mapping[str, str]) -> list[str]:
        """Variables that are read by imports, and have another value in ``env``."""
        ours, theirs = (
            {item for item in e.items() if item[0].startswith(READ_AT_IMPORT) and not item[0].startswith(READ_LATER)}
            for e in (self.env, env)
        )
        return sorted({name for name, _ in ours ^ theirs})

    def start(self, argv: list[str], env: Mapping[str, str], stdout: int, stderr: int, cwd: Path = ROOT) -> Forked:
        """Start ``python <argv>``.

        Args:
            argv: A script and its overrides, of which the last of each key counts.
            env: All environment variables of the process.
            stdout: File descriptor.
            stderr: File descriptor.
            cwd: Working directory.
        """
        argv = last_of_each(argv)
        differing = self.differing(env)
        assert not differing, f"{differing} are read by imports and differ; start a new process"
        ours, theirs = socket.socketpair()
        with theirs, open(os.devnull, "rb") as nothing:
            socket.send_fds(self._socket, [b"+"], [theirs.fileno(), nothing.fileno(), stdout, stderr])
        ours.sendall(json.dumps({"argv": argv, "env": dict(env), "cwd": str(cwd)}).encode())
        ours.shutdown(socket.SHUT_WR)
        return Forked(argv, ours)

    def close(self) -> None:
        """End the server and all its children."""
        self._socket.close()
        self._process.wait(timeout=20)


def last_of_each(argv: list[str]) -> list[str]:
    """Keep the last argument of each key, as commands refuse a key that is given twice; tests change ``QUICK``."""
    if any(argument.endswith(("sync", "sync.py")) for argument in argv):
        return argv
    keys = [argument.partition("=")[0].lstrip("+") if "=" in argument else None for argument in argv]
    last = {key: index for index, key in enumerate(keys)}
    return [argument for index, argument in enumerate(argv) if keys[index] is None or last[keys[index]] == index]


class Forked:
    """A running command, with the methods of ``subprocess.Popen`` that tests use. As a context manager, kills it."""

    def __init__(self, argv: list[str], connection: socket.socket) -> None:
        self.argv, self._connection = argv, connection
        self._received = b""
        while b"\n" not in self._received:
            part = connection.recv(64)
            assert part, "the fork server has ended"
            self._received += part
        pid, _, self._received = self._received.partition(b"\n")
        self.pid = int(pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status as in ``subprocess``, or None while the process runs."""
        return self._ended(0.0)

    def wait(self, timeout: float) -> int:
        """Wait for the exit status; raise ``subprocess.TimeoutExpired`` after the timeout."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.argv, timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, not to its children."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill_group(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process group, even if the process itself has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill_group()
        self.wait(20)
        self._connection.close()

    def _ended(self, timeout: float) -> int | None:
        end = time.monotonic() + timeout
        while self.returncode is None:
            self._connection.settimeout(max(end - time.monotonic(), 0.0))
            try:
                part = self._connection.recv(64)
            except (TimeoutError, BlockingIOError):
                return None
            assert part, "the fork server has ended"
            self._received += part
            if self._received.endswith(b"\n"):
                self.returncode = os.waitstatus_to_exitcode(int(self._received))
        return self.returncode


def communicate(processes: Sequence[Forked], pipes: Sequence[int], timeout: float) -> tuple[list[str], bool]:
    """Read all pipes until they are closed, and wait for all processes.

    Args:
        processes: Processes to wait for.
        pipes: File descriptors to read from.
        timeout: Seconds until the process groups are killed.

    Returns:
        The output of each pipe, and whether all ended before the timeout.
    """
    end = time.monotonic() + timeout
    found = dict.fromkeys(pipes, b"")
    ended = True
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(end - time.monotonic(), 0.0) if ended else 5.0)
            if not ready:
                if not ended:
                    break  # a process outside of the group keeps the pipe open
                ended = False
                for process in processes:
                    process.kill_group()
            for key, _ in ready:
                part = os.read(key.fd, 65536)
                found[key.fd] += part
                if not part:
                    selector.unregister(key.fd)
    for process in processes:
        try:
            process.wait(max(end - time.monotonic(), 0.0) if ended else 5.0)
        except subprocess.TimeoutExpired:
            ended = False
    return [found[pipe].decode() for pipe in pipes], ended


def rank_variables(processes: int) -> list[dict[str, str]]:
    """Return the environment variables that torchrun sets for each process on one node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    world |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_WORLD_SIZE": processes, "ROLE_NAME": "default"}
    world |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    ranks = ({"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank} for rank in range(processes))
    return [{name: str(value) for name, value in (world | rank).items()} for rank in ranks]


# --- code of the fork server and its children ---


def prepare() -> None:
    """Import all modules of the scripts, and check that no thread was started."""
    import importlib
    import pkgutil
    from importlib.util import find_spec

    import boltcutter

    for module in pkgutil.walk_packages(boltcutter.__path__, "boltcutter."):
        # Ray replaces handlers of the process; Keras takes seconds, and is seldom used
        if ".ray_" not in module.name and "keras" not in module.name:
            importlib.import_module(module.name)
    for name in LATE:
        if find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    warm_up()
    tasks = Path("/proc/self/task")
    threads = len(list(tasks.iterdir())) if tasks.is_dir() else 1
    assert threads == 1, f"{threads} threads after imports; a fork would have only one of them"
    gc.collect()
    gc.freeze()  # garbage collection would copy memory pages that children share


def warm_up() -> None:
    """Check a configuration, so that children need not parse its YAML, patterns and annotations again."""
    import io
    import warnings
    from contextlib import redirect_stdout

    from boltcutter import extend, project
    from boltcutter.planning import check
    from boltcutter.run.remote import store

    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        # On the CPU, as a fork cannot use a GPU that was used before.
        check.check_command(project.Project.at(ROOT), ["trainer.accelerator=cpu"])
    for cached in (extend.parts, extend.commands, project.declared_parts, store.run_store):
        cached.cache_clear()  # which parts there are depends on the environment of the child


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return the request in a child, and None in the server when its socket is closed."""
    children: dict[int, socket.socket] = {}
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(woken, selectors.EVENT_READ)
    selector.register(control, selectors.EVENT_READ)
    control.sendall(b"r")
    while True:
        ready = [key.fd for key, _ in selector.select()]
        if woken in ready:
            os.read(woken, 4096)
            _report_exits(children)
        if control.fileno() not in ready:
            continue
        data, files, _, _ = socket.recv_fds(control, 1, 4)
        if not data:
            for pid in children:
                os.killpg(pid, signal.SIGKILL)
            return None
        connection = socket.socket(fileno=files[0])
        request: dict[str, Any] = json.loads(connection.makefile("rb").read())
        child = os.fork()
        if child:
            children[child] = connection
            for file in files[1:]:
                os.close(file)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        selector.close()
        for other in (control, *children.values()):
            other.close()
        os.close(woken)
        os.close(wake)
        os.setsid()
        for target, file in enumerate(files[1:]):
            os.dup2(file, target)
            os.close(file)
        connection.sendall(f"{os.getpid()}\n".encode())
        connection.close()
        return request


def _report_exits(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with children.pop(pid) as connection, suppress(BrokenPipeError):  # the client may have closed it
            connection.sendall(f"{status}\n".encode())


def set_up(request: dict[str, Any]) -> dict[str, Any]:
    """Set up this process as if it had just been started, and return the namespace of its main module."""
    import numpy as np
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    script = request["argv"][0]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [str(Path(script).resolve().parent), *given, *(p for p in sys.path[1:] if p not in own)]
    sys.argv[:] = request["argv"]
    sys.orig_argv[:] = [sys.executable, *request["argv"]]
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    tempfile.tempdir = None
    np.random.seed()
    rank_zero_only.rank = _get_rank() or 0  # Lightning reads it from the environment when it is imported
    main = type(sys)("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    return main.__dict__


class Exit:
    """Ends a child immediately after its last ``atexit`` handler.

    Otherwise the interpreter finalizes all modules, and so copies all memory that the child shares with the server,
    which takes half of the CPU time of a short training.
    """

    status: int | None = None  # unknown: ends as usual

    def exit(self) -> None:
        if self.status is not None:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(self.status)

    def status_of(self, error: BaseException) -> int | None:
        """Return the exit status of a process that ends with ``error``; None if it ends by a signal."""
        if isinstance(error, KeyboardInterrupt):
            return None
        if not isinstance(error, SystemExit):
            return 1
        return 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1


if __name__ == "__main__":
    this = sys.modules["__main__"]  # keeps a reference: an unreferenced module is cleared
    end = Exit()
    atexit.register(end.exit)  # handlers run in reverse order of registration
    prepare()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request:
        scope = set_up(request)
        code = compile(Path(request["argv"][0]).read_bytes(), request["argv"][0], "exec")
        try:
            exec(code, scope)
            end.status = 0
        except BaseException as error:  # printed by the interpreter
            end.status = end.status_of(error)
            if end.status is None:
                gc.unfreeze()  # else libraries report what is frozen as leaked when the interpreter ends
            raise
