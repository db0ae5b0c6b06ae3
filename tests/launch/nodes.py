"""Machines for tests: namespaces of this one that are connected by a network, each with a file system of its own.

``with nodes(2) as machines`` boots two. ``machines[0].start(command, env)`` starts a command there, which sees exactly
the variables in ``env``, as a platform does. A machine sees the files of this one; what it writes is private to it, and
lost at the end. A server that listens on all addresses here is at ``machines[0].gateway``. There is no other network.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from conftest import AS_ROOT, ROOT, patience, unavailable

SUBNETS = 250  # of 10.214.0.0/16, so that many tests can have machines at the same time
UNSHARE = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
# The first process of a machine. It ends with the test, also if that is killed: at the end of its standard input. The
# kernel then kills all processes of its PID namespace, and removes its network and its mounts.
WAIT = "echo ready; cat <&0 >/dev/null & wait $!"
BOOT = r"""
set -euo pipefail
folder=$1 host=$2 names=$3
shift 3
hostname "$host"
mount -t tmpfs machine "$folder"
mkdir "$folder"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$folder/root"
cd "$folder/root"
findmnt -rno TARGET | while read -r at; do
    case $at in / | /proc* | /sys* | /dev* | /tmp* | /etc/* | "$folder"*) continue ;; esac
    mount --bind "$at" ".$at" && mount -o remount,bind,ro ".$at" || true # other disks
done 2>/dev/null
mount --rbind /dev dev
mount --rbind /sys sys
mount -t proc proc proc
mount -t tmpfs machine dev/shm
mount -t tmpfs -o mode=1777 machine tmp
for at; do
    path=${at#rw:}
    mkdir -p ".$path" && mount --bind "$path" ".$path"
    [[ $at == rw:* ]] || mount -o remount,bind,ro ".$path"
done
printf '%s' "$names" >etc/hosts
echo "hosts: files" >etc/nsswitch.conf
mkdir -p .host
pivot_root . .host
umount -l /.host
rmdir /.host
"""


class Process:
    """A command on a machine, whose output is captured.

    Args:
        machine: The machine.
        command: The command and its arguments.
        number: Number of the command on its machine.

    Attributes:
        log: File with what it has written to stdout and stderr.
    """

    def __init__(self, machine: Machine, command: list[str], number: int) -> None:
        self.machine = machine
        self.log = machine.folder / f"{machine.host}-{number}.log"
        self._pid_file = f"/run/boltcutter-test-{number}"
        started = ["sh", "-c", 'echo $$ >"$0" && exec "$@"', self._pid_file, *command]
        with self.log.open("wb") as log:
            self._popen = subprocess.Popen(
                machine.inside(started), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def output(self) -> str:
        """What the command has written to stdout and stderr so far."""
        return self.log.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """Whether the command has not ended."""
        return self._popen.poll() is None

    def signal(self, name: str = "TERM") -> None:
        """Send a signal to the process of the command, and not to those that it has started."""
        self.machine.run("sh", "-c", f'kill -{name} "$(cat {self._pid_file})"')

    def wait(self, seconds: float = 240) -> int:
        """Return the exit status of the command, or fail with its output after a time limit."""
        try:
            return self._popen.wait(patience(seconds))
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.machine.host}: the command did not end within {seconds} s:\n{self.output}")

    def wait_for(self, text: str, seconds: float = 120) -> None:
        """Wait until the output contains a text, or fail with the output."""
        self.wait_until(lambda: text in self.output, seconds)

    def wait_until(self, is_done: Callable[[], object], seconds: float = 120) -> None:
        """Wait until a condition is true, or fail with the output if the command ends or after a time limit."""
        end = time.monotonic() + patience(seconds)
        while not is_done():
            if not self.is_running or time.monotonic() > end:
                if is_done():
                    return
                pytest.fail(f"{self.machine.host}: not within {seconds} s, or the command has ended:\n{self.output}")
            time.sleep(0.1)


class Machine:
    """One machine.

    Args:
        host: Its host name.
        address: Its address.
        gateway: Address of this machine, where the servers of a test listen.
        folder: Folder for logs.
        pid: Its first process.
    """

    def __init__(self, host: str, address: str, gateway: str, folder: Path, pid: int) -> None:
        self.host, self.address, self.gateway, self.folder, self.pid = host, address, gateway, folder, pid
        self.processes: list[Process] = []

    def start(
        self, command: Sequence[str], env: Mapping[str, str], *, files: Mapping[str, str] | None = None, cwd: str = "/"
    ) -> Process:
        """Start a command.

        Args:
            command: The command and its arguments.
            env: All of its environment variables. This includes ``PATH``.
            files: Text of files by path, written before.
            cwd: Its working directory.
        """
        for path, text in (files or {}).items():
            self.write(path, text)
        variables = [f"{name}={value}" for name, value in env.items()]
        self.processes.append(Process(self, ["env", "-i", f"--chdir={cwd}", *variables, *command], len(self.processes)))
        return self.processes[-1]

    def run(self, *command: str, text: str | None = None) -> str:
        """Run a command as root to its end; returns its stdout.

        Args:
            command: The command and its arguments.
            text: Its standard input.
        """
        return self._run(command, text or "").decode()

    def _run(self, command: Sequence[str], text: str = "") -> bytes:
        done = subprocess.run(self.inside(command), input=text.encode(), capture_output=True, timeout=patience(60))
        assert done.returncode == 0, f"{self.host}: {shlex.join(command)}: {done.stderr.decode()}"
        return done.stdout

    def write(self, path: str, text: str, mode: str = "644") -> None:
        """Write a file of this machine."""
        self.run("sh", "-c", 'mkdir -p "$(dirname "$0")" && cat >"$0" && chmod "$1" "$0"', path, mode, text=text)

    def read(self, path: str) -> bytes:
        """Return the content of a file of this machine."""
        return self._run(["cat", path])

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs another as root on this machine."""
        return [*AS_ROOT, "nsenter", "-t", str(self.pid), "--net", "--uts", "--pid", "--mount", "--", *command]


@contextmanager
def nodes(
    count: int = 2,
    *,
    hosts: Sequence[str] | None = None,
    shared: Sequence[Path | str] = (),
    volumes: Sequence[Path] = (),
) -> Iterator[list[Machine]]:
    """Boot machines that reach each other and this one, and nothing else.

    Skips the test if this is not possible here, and fails it on CI.

    Args:
        count: Number of machines.
        hosts: Their host names, each optionally followed by other names that resolve to it; None: ``node0``, ….
        shared: Folders in ``/tmp`` that the machines see too, read-only; others in ``/tmp`` they do not see.
        volumes: Folders in ``/tmp`` that all machines can write.
    """
    names = list(hosts or [f"node{number}" for number in range(count)])
    assert len(names) == count
    needed = {Path(path).resolve() for path in (ROOT, sys.prefix, sys.base_prefix, *shared)}
    visible = sorted(str(path) for path in needed if path.is_relative_to("/tmp"))
    visible += [f"rw:{path.resolve()}" for path in volumes]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nodes-")))
        machines: list[Machine] = []
        stack.callback(lambda: [process.wait(30) for machine in machines for process in machine.processes])
        try:
            hub = _boot(stack, [*AS_ROOT, "unshare", "--net", "--pid", "--fork", "--kill-child=KILL"], "", [])
            subnet = _connect(hub)
            addresses = [f"{subnet}.{number}" for number in range(10, 10 + count)]
            lines = ["127.0.0.1 localhost", *map(" ".join, zip(addresses, names, strict=True))]
            for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
                host = name.split()[0]
                (folder / host).mkdir()
                facts = [str(folder / host), host, "\n".join(lines) + "\n", *visible]
                pid = _boot(stack, [*AS_ROOT, *UNSHARE], BOOT, facts)
                _in_network(hub, f"link add to{number} type veth peer name eth0 netns {pid}")
                _in_network(hub, f"link set to{number} master bridge up")
                for line in (f"addr add {address}/24 dev eth0", "link set lo up", "link set eth0 up"):
                    _in_network(pid, line)
                machines.append(Machine(host, address, f"{subnet}.1", folder, pid))
        except (OSError, subprocess.CalledProcessError) as error:
            unavailable(f"this machine allows no namespaces: {error} {getattr(error, 'stderr', '')}")
        yield machines


def _boot(stack: ExitStack, unshare: list[str], script: str, arguments: list[str]) -> int:
    """Start the first process of namespaces, which end with the stack; returns its ID."""
    command = [*unshare, "bash", "-c", script + WAIT, "bash", *arguments]
    pipe = subprocess.PIPE
    started = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    stack.callback(_end, started)
    assert started.stdout
    assert started.stderr
    if started.stdout.readline() != "ready\n":
        raise OSError(started.stderr.read().strip())
    for process in psutil.Process(started.pid).children(recursive=True):
        status = Path(f"/proc/{process.pid}/status").read_text()
        if (ids := next(line for line in status.splitlines() if line.startswith("NSpid:")).split())[-1] == "1":
            assert len(ids) > 2
            return int(process.pid)
    raise OSError("no process has ID 1")


def _end(started: subprocess.Popen[str]) -> None:
    with suppress(BrokenPipeError):
        started.communicate(timeout=30)  # closes its standard input


def _connect(hub: int) -> str:
    """Connect the network of the machines to this one, by a link that ends with it; returns the subnet."""
    for number in range(SUBNETS):
        link, subnet = f"bolt{number}", f"10.214.{number}"
        try:
            _ip(f"link add {link} type veth peer name uplink netns {hub}")
        except subprocess.CalledProcessError as error:
            if "File exists" not in error.stderr:
                raise
            continue  # of another test
        for line in ("link set lo up", "link add bridge type bridge", "link set bridge up"):
            _in_network(hub, line)
        _in_network(hub, "link set uplink master bridge up")
        _ip(f"addr add {subnet}.1/24 dev {link}")
        _ip(f"link set {link} up")
        return subnet
    raise OSError("all subnets are in use")


def _ip(line: str, *before: str) -> None:
    command = [*AS_ROOT, *before, "ip", *line.split()]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


def _in_network(pid: int, line: str) -> None:
    _ip(line, "nsenter", "-t", str(pid), "--net")


def reachable(variables: dict[str, str], machine: Machine) -> dict[str, str]:
    """Variables with which a machine reaches the server."""
    own = {name: value.replace("0.0.0.0", machine.gateway) for name, value in variables.items()}
    return own | {"PATH": "/usr/bin:/bin"}
