"""Connect to a Ray cluster, or start one on this machine that ends with its block.

An embedded cluster writes only to a folder of its own in the temporary directory, which is removed at the end. If the
process is killed, the kernel ends Ray's processes with it, and the next embedded cluster on this machine removes the
folder, whose lock is then free, and any process that is left.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from boltcutter.config.errors import one_line
from boltcutter.project import install_command

LOCK = "lock"  # file in the folder of an embedded cluster, locked as long as its process runs
PREFIX = "ray-bc-"
MAX_TEMP_LENGTH = 40  # bytes; with Ray's folders below it, paths of sockets have up to 107, the limit
OBJECT_STORE_BYTES = 100_000_000  # Ray's default is 30% of the memory, and we store only small objects
EXIT_TIMEOUT = 10.0  # seconds that Ray's processes have to exit after a shutdown
CONNECT_TIMEOUT = 5.0  # seconds; ray.init would try for two minutes
QUIET: Any = {"log_to_driver": False, "logging_level": "ERROR"}
PORTS = {"dashboard": "dashboard_port", "metrics": "_metrics_export_port"}
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # workers that nothing would use
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a task without GPUs keeps CUDA_VISIBLE_DEVICES
}
_TOKEN = secrets.token_hex(32)  # Ray caches it for the process


class ClusterError(ValueError):
    """Ray does not start on this machine."""


@contextmanager
def ray_cluster(
    *,
    address: str | None = None,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    dashboard: bool = False,
    ports: Mapping[str, int] = MappingProxyType({}),
    timeout: float = 0,
    setting: str = "launch",
    log_to_driver: bool = False,
) -> Iterator[None]:
    """Connect this process to Ray during the block.

    Args:
        address: Existing cluster: ``host:port``, ``ray://host:port`` or ``auto``; None: a cluster on this machine.
        num_cpus: CPUs of the embedded cluster; None: those of the machine.
        num_gpus: GPUs of the embedded cluster; None: those of the machine.
        dashboard: Whether the embedded cluster has a dashboard.
        ports: Ports of the embedded cluster, by the names in ``PORTS``; others are free ports.
        timeout: Seconds to wait for a cluster that is starting; an embedded one is started again until then.
        setting: Group of the settings, for messages.
        log_to_driver: Whether this process prints the output of the workers of an existing cluster.

    Raises:
        ValueError: Ray is not installed, or cannot be reached.
        ClusterError: Ray does not start on this machine.
    """
    if unknown := ports.keys() - PORTS:
        raise ValueError(f"{setting}.ports.{min(unknown)}: no such port; choose from {', '.join(PORTS)}")
    for port in ports.values():
        _check_free(port, f"{setting}.ports")
    with ExitStack() as stack:
        stack.enter_context(_variables())
        with _kept_sigterm_handler():
            try:
                import ray
            except ImportError:
                raise ValueError(f"{setting}: ray is not installed; {install_command('ray')}") from None
            stack.callback(ray.shutdown)
            if address:
                end = time.monotonic() + timeout
                check_reachable(address, f"{setting}.address", timeout)
                while not ray.is_initialized():  # a head that is starting accepts connections before it can be used
                    try:
                        ray.init(address=address, **{**QUIET, "log_to_driver": log_to_driver})
                    except (ConnectionError, RuntimeError, ValueError) as error:
                        if time.monotonic() > end:
                            raise ValueError(
                                f"{setting}.address={address}: {one_line(error, 200)}; start it with `ray start --head`"
                            ) from None
                        time.sleep(1)
            else:
                remove_stale_clusters()
                options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "include_dashboard": dashboard}
                options |= {PORTS[name]: port for name, port in ports.items()}
                end = time.monotonic() + timeout
                while True:
                    try:
                        stack.enter_context(_embedded(setting, options))
                        break
                    except ClusterError:
                        if time.monotonic() > end:
                            raise
        yield


@contextmanager
def _embedded(setting: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Start a cluster on this machine, and end all of its processes after the block."""
    import ray

    with ExitStack() as stack:
        temp = stack.enter_context(_temp_folder())
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(temp / "token")
        import psutil  # of Ray

        processes = set[Any]()
        stack.callback(_end, processes)
        stack.callback(ray.shutdown)
        this = psutil.Process()
        others = _descendants([this])
        try:
            found = ray.init(
                address="local", _temp_dir=str(temp / "r"), object_store_memory=OBJECT_STORE_BYTES, **QUIET, **options
            )
        except Exception as error:  # which is all that Ray raises after 30 seconds, a constant of its node.py
            raise ClusterError(
                f"{setting}: Ray does not start on this machine ({one_line(error, 200)}); try again when it is less "
                f"busy, or start a cluster with `ray start --head`, and set {setting}.address=auto"
            ) from error
        finally:
            processes.update(_descendants([this]) - others)
        if options["include_dashboard"]:
            print(f"note: Ray's dashboard is at http://{found.dashboard_url}; its token is in {temp}/token")
        stack.callback(lambda: processes.update(_descendants(processes)))  # before the shutdown
        yield


def remove_stale_clusters() -> None:
    """Remove what embedded clusters of killed processes have left on this machine."""
    for lock in Path(_temp_root()).glob(f"{PREFIX}*/{LOCK}"):
        temp = lock.parent
        try:
            if temp.lstat().st_uid != os.getuid():  # of a folder of this user, nobody else can have written the lock
                continue
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _end(_servers(temp), timeout=0)
                _remove(temp)
        except OSError:  # in use, or just removed
            continue
        print(f"note: Ray was not shut down by an earlier process; removed its processes and {temp}", file=sys.stderr)


def _check_free(port: int, setting: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            raise ValueError(f"{setting}: {port} cannot be used ({error}); choose another, or remove it") from None


def check_reachable(address: str, setting: str, timeout: float = 0) -> None:
    """Check that something accepts connections at an address, as ``ray.init`` would try for two minutes.

    Args:
        address: ``host:port``, a URL, or ``auto``, which is checked if ``RAY_ADDRESS`` is set.
        setting: Name of the setting.
        timeout: Seconds to wait for it.

    Raises:
        ValueError: Nothing accepts connections.
    """
    given = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = given.rpartition("://")[2].rpartition(":")
    if not port.isdecimal():
        return  # Ray searches on this machine
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() > end:
                remedy = "correct it, or start a cluster there with `ray start --head`"
                raise ValueError(f"{setting}={given} cannot be reached ({error}); {remedy}") from None
        time.sleep(0.5)


@contextmanager
def _variables() -> Iterator[None]:
    """Set the variables of ``ENVIRONMENT`` that are not set, and restore all of Ray's variables after the block."""
    before = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    os.environ.update(ENVIRONMENT | before)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _kept_sigterm_handler() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _temp_root() -> str:
    """The temporary directory, or ``/tmp`` if its path is too long for sockets."""
    root = tempfile.gettempdir()
    return root if len(os.fsencode(root)) + len(PREFIX) + 9 <= MAX_TEMP_LENGTH else "/tmp"  # noqa: S108 - Ray's folder


def _remove(temp: Path) -> None:
    """Remove a folder in which an ending process may still create files."""
    end = time.monotonic() + EXIT_TIMEOUT
    while temp.exists() and time.monotonic() < end:
        shutil.rmtree(temp, ignore_errors=True)
        time.sleep(0.02)


@contextmanager
def _temp_folder() -> Iterator[Path]:
    """A folder that other users cannot enter; Ray makes its own folder in it writable for all."""
    temp = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_temp_root()))
    try:
        (temp / "token").touch(0o600)
        (temp / "token").write_text(_TOKEN)  # else Ray writes one to HOME
        with (temp / "draft").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # which the kernel releases when this process ends
            (temp / "draft").rename(temp / LOCK)
            yield temp
    finally:
        _remove(temp)


def _descendants(processes: Iterable[Any]) -> set[Any]:
    import psutil  # of Ray

    found = set[Any]()
    for process in processes:
        with suppress(psutil.Error):  # it has exited
            found.update(process.children(recursive=True))
    return found


def _servers(temp: Path) -> list[Any]:
    """Return what Ray has started with this folder."""
    import psutil  # of Ray

    every = psutil.process_iter(["cmdline"])
    return [process for process in every if f"{temp}/" in " ".join(process.info["cmdline"] or ())]


def _end(processes: Iterable[Any], timeout: float = EXIT_TIMEOUT) -> None:
    """Wait for processes to exit, and kill those that do not."""
    import psutil  # of Ray

    for process in psutil.wait_procs(list(processes), timeout)[1]:
        with suppress(psutil.Error):
            process.kill()
