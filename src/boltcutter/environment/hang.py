"""Where the ranks of a run are, and the process that watches them: it reports a run without progress, and ends it.

It runs as a script of its own, ``python -I -S hang.py <folder> <timeout> <pid>``, one on each node, without packages:
within a millisecond, and whatever Python code or C code of a rank does. ``boltcutter why --hang`` uses its functions.
Ranks are found by the memory files of ``announcement.py``, which only processes of the same user can have open.
"""

from __future__ import annotations

import json
import linecache
import math
import os
import re
import select
import signal
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, NamedTuple

FACTS, STACKS = "boltcutter-facts", "boltcutter-stacks"
SIZE, MESSAGE = 8192, 4096  # bytes of the facts, and where the reason for its end is written
MAX_STACKS = 1 << 22  # bytes of the stacks of a process
ASK = getattr(signal, "SIGRTMIN", 0) + 6  # asks a process for its stacks
END = getattr(signal, "SIGRTMIN", 0) + 7  # raises HangError in a process
ANSWER_SECONDS = 2.0  # for stacks
POLL_SECONDS = 0.5
START_SECONDS = 10.0  # for which the rank that has started this process is looked for
SUSPENDED = 10.0  # seconds between two polls after which this process was suspended itself
EARLY = 2.5  # seconds before the timeout at which stacks are taken, while collectives still wait
GRACE = 12.0  # seconds that a rank has to notice that another has failed
HELD_GRACE = 2.0  # of one that had made no progress for long before
END_SECONDS = 5.0  # for HangError, after which a process is killed
FIRST = 10  # times the timeout, after which a run is ended that is busy before its first batch, or compiles
BUSY = 0.01  # seconds of CPU a second, from which it is busy
STORED = 1 << 20  # bytes in a timeout, read from and written to storage devices, from which it is
MAX_SCAN = 10.0  # seconds between two searches for further processes
DEEPEST = 40  # frames of a stack on the terminal

THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)\b.*\(most recent call first\):")
FRAME = re.compile(r'  File "(.*)", line ([0-9]+) in (.*)')
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "in the kernel, such as for a file system"}
LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", "<")
STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
PLACES = (LIBRARY, *STANDARD)
COLLECTIVES = [f"{os.sep}torch{os.sep}distributed{os.sep}", f"{os.sep}torch{os.sep}nn{os.sep}parallel{os.sep}"]
COLLECTIVES += [f"{LIBRARY}strategy{os.sep}{name}.py" for name in ("shared_memory", "mpi", "horovod")]
# What may hang by itself, and calls no code of the user.
INNER = tuple(f"{LIBRARY}{name}{os.sep}" for name in ("checkpoint", "data", "logger", "model", "report", "run", "task"))
COMPILERS = (f"{os.sep}torch{os.sep}_dynamo{os.sep}", "/triton/")  # Inductor is called by Dynamo
DEBUGGERS = ("pdb.py", "bdb.py", f"{os.sep}debugpy{os.sep}", f"{os.sep}pydevd")
BACKWARD = "_engine_run_backward"


class Frame(NamedTuple):
    """A call in a stack.

    Args:
        file: Its path in the process.
        line: In the file.
        function: Its name.
        same: The same file of this process, if the other one has this or the standard library elsewhere, as in a copy.
    """

    file: str
    line: int
    function: str
    same: str = ""

    @property
    def known(self) -> str:
        """The path by which it is told what the file is of."""
        return self.same or self.file

    @property
    def is_of_user(self) -> bool:
        """Whether it is neither of an installed package nor of the standard library or this one."""
        known = self.known
        return not (known.startswith((LIBRARY, *INSTALLED[2:], *STANDARD)) or self.is_installed)

    @property
    def is_installed(self) -> bool:
        """Whether it is of an installed package, which may be in a folder of the standard library."""
        return any(at in self.known for at in INSTALLED[:2])

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()[:100]
        return f"{self.file}:{self.line} in {self.function}{f': {text}' if text else ''}"


def write_text(file: int, offset: int, text: str) -> None:
    """Write text of up to 4 kB into a memory file, with its length."""
    data = text.encode()[: MESSAGE - 4]
    os.pwrite(file, len(data).to_bytes(4, "little") + data, offset)


def read_text(file: int, offset: int) -> str:
    """Read what ``write_text`` wrote there; empty if nothing was."""
    found = os.pread(file, MESSAGE, offset)
    return found[4 : 4 + int.from_bytes(found[:4], "little")].decode(errors="replace")


class Process:
    """A process of a run: a rank, or one that a rank has forked, such as a worker of a loader.

    Args:
        pid: Its process ID.
        number: File descriptor of its facts.

    Raises:
        OSError: It has ended, or is that of another user.
        ValueError: It has no facts yet.
        KeyError: Its facts are of another version of this library.
    """

    def __init__(self, pid: int, number: str) -> None:
        self.pid, self.number, self.frames, self.text, self.note = pid, number, list[Frame](), "", ""
        self.pidfd = self.file = self.stacks = self.signals = -1
        self._state, self._begin = "", 0
        try:
            self.pidfd = os.pidfd_open(pid)
            self.file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY)
            self.facts = self.read()
            self.stacks = os.open(f"/proc/{pid}/fd/{self.facts['stacks']}", os.O_RDONLY)
            self.signals = os.open(f"/proc/{pid}/fd/{self.facts['signals']}", os.O_RDONLY | os.O_NONBLOCK)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close its files."""
        for file in (self.pidfd, self.file, self.stacks, self.signals):
            if file >= 0:
                os.close(file)

    def read(self) -> dict[str, Any]:
        """Its facts now."""
        for _ in range(10):  # it may be writing them
            with suppress(ValueError, TypeError):
                self.facts = dict(json.loads(read_text(self.file, 0)))
                return self.facts
        raise ValueError("no facts")

    @property
    def is_rank(self) -> bool:
        """Whether it has made its facts itself, rather than a process that has forked it."""
        return bool(self.facts["pid"] == self.pid)

    def is_forked(self) -> bool:
        """Whether it was forked by the one that made the facts, rather than reads them, as this process does."""
        number = self.facts["stacks"]
        with suppress(OSError, StopIteration), open(f"/proc/{self.pid}/fdinfo/{number}") as file:
            flags = next(line for line in file if line.startswith("flags")).split()[1]
            is_stacks = os.readlink(f"/proc/{self.pid}/fd/{number}").startswith(f"/memfd:{STACKS}")
            return is_stacks and int(flags, 8) & os.O_ACCMODE == os.O_RDWR
        return False

    def is_alive(self) -> bool:
        """Whether it runs; not if it has only not been waited for."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def state(self) -> str:
        """The letter by which ``ps`` shows what it does."""
        with suppress(OSError), open(f"/proc/{self.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
        return ""

    def handles(self, number: int) -> bool:
        """Whether it has a handler for a signal, which would end it otherwise."""
        with suppress(OSError, StopIteration):
            with open(f"/proc/{self.pid}/status") as file:
                mask = next(line for line in file if line.startswith("SigCgt")).split()[1]
            return bool(int(mask, 16) >> (number - 1) & 1)
        return False

    def send(self, number: int) -> None:
        """Send a signal, to this process only, even if its ID is used again."""
        with suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, number)

    def received(self, number: int) -> bool:
        """Whether it has received a signal since the last call, whose handler is of this library."""
        found = b""
        with suppress(OSError):
            found = os.read(self.signals, 4096)
        return number in found and bool(self.facts["answers"])

    def request(self, *, wakes: bool = False) -> None:
        """Ask for its stacks, which ``answer`` waits for.

        Args:
            wakes: Whether a process that a signal has stopped is continued for as long as that takes.
        """
        self.frames, self.text, self._state, self._begin = [], "", self.state(), -1
        self.note = STATES.get(self._state, "")
        if not self.handles(ASK) or (self._state in "Tt" and not wakes):
            return
        self._begin = os.fstat(self.stacks).st_size
        self.send(ASK)
        if self._state == "T":
            self.send(signal.SIGCONT)

    def answer(self, end: float) -> None:
        """Read the stacks that were asked for, until a time of the monotonic clock."""
        if (seen := self._begin) < 0:
            return
        while True:
            size = os.fstat(self.stacks).st_size
            if (size > self._begin and size == seen) or time.monotonic() > end:
                break
            seen = size
            time.sleep(0.05)
        if self._state == "T":
            self.send(signal.SIGSTOP)
            while self.state() in "RSD" and self.is_alive() and time.monotonic() < end + ANSWER_SECONDS:
                time.sleep(0.01)
        self.text = os.pread(self.stacks, min(seen - self._begin, MAX_STACKS), self._begin).decode(errors="replace")
        self.frames = main_stack(self.text, int(self.facts["main"]), self.facts.get("places", PLACES))
        if not self.frames:
            self.note = self.note or "does not answer"

    @property
    def place(self) -> Frame | None:
        """Where it is."""
        return place_of(self.frames)

    @property
    def collective(self) -> str:
        """The operation in which it waits for other ranks; empty if it does something else."""
        found = ""
        for frame in self.frames:
            if any(at in frame.known for at in COLLECTIVES):
                found = frame.function
            elif found or not frame.known.startswith(STANDARD):
                break
        return found or ("backward" if self.frames and self.frames[0].function == BACKWARD else "")


def ask(processes: Sequence[Process], *, wakes: bool = False) -> None:
    """Read the stacks of processes: of all ranks at the same moment, then of those that they have forked.

    A process that was forked writes its stacks into the file of its rank, so both are not asked at once.

    Args:
        processes: Processes of a run.
        wakes: Whether those that a signal has stopped are continued for as long as that takes.
    """
    families: dict[int, list[Process]] = {}
    for one in processes:
        families.setdefault(one.facts["pid"], []).append(one)
    for asked in zip_longest(*families.values()):
        at_once = [one for one in asked if one is not None]
        for one in at_once:
            one.request(wakes=wakes)
        end = time.monotonic() + ANSWER_SECONDS
        for one in at_once:
            one.answer(end)


def main_stack(text: str, main: int, places: Sequence[str] = PLACES) -> list[Frame]:
    """The stack of the main thread in what ``faulthandler`` wrote; that of the last thread if it is not there.

    Args:
        text: Stacks of all threads.
        main: Its number.
        places: Where the process has this and the standard library, in the order of ``PLACES``.
    """
    moved = [(theirs, ours) for theirs, ours in zip(places, PLACES, strict=False) if theirs != ours]
    stacks: dict[int, list[Frame]] = {}
    for line in text.splitlines():
        if found := THREAD.match(line):
            stacks[int(found[1], 16)] = current = []
        elif stacks and (found := FRAME.match(line)):
            same = next((ours + found[1][len(theirs) :] for theirs, ours in moved if found[1].startswith(theirs)), "")
            current.append(Frame(found[1], int(found[2]), found[3], same))
    return stacks.get(main) or (list(stacks.values())[-1] if stacks else [])


def place_of(frames: Sequence[Frame]) -> Frame | None:
    """The innermost call of the user's code, or else of this library, or of any package that waits for other ranks."""
    last = max((at for at, frame in enumerate(frames) if frame.known.startswith(LIBRARY)), default=-1)
    inner = frames[:last] if last >= 0 else frames  # without the script that has called the library
    own = [frame for frame in inner if frame.is_of_user]
    library = [frame for frame in inner if frame.known.startswith(INNER)]
    others = [frame for frame in inner if frame.is_installed or not frame.known.startswith(STANDARD)]
    callers = [frame for frame in others if not any(at in frame.known for at in COLLECTIVES)]
    return next(iter(own or library or callers or others or frames), None)


def find(folder: str, known: Sequence[int] = ()) -> list[Process]:
    """The processes of a run on this machine, ranks first and in their order; those in ``known`` are left out."""
    found: list[Process] = []
    for entry in os.scandir("/proc"):
        if not re.fullmatch("[0-9]+", entry.name) or int(entry.name) in known:
            continue
        with suppress(OSError, StopIteration):
            if owner(int(entry.name)) == os.geteuid():
                found += _of(int(entry.name), folder)
    return sorted(found, key=lambda one: (not one.is_rank, one.facts["rank"], one.pid))


def owner(pid: int) -> int:
    """User ID of a process: its entry in ``/proc`` is of root, whoever runs it, if it allows no debugger."""
    with open(f"/proc/{pid}/status") as file:
        return int(next(line for line in file if line.startswith("Uid:")).split()[1])


def _of(pid: int, folder: str) -> Iterator[Process]:
    files = f"/proc/{pid}/fd"
    candidates = []
    for number in sorted(os.listdir(files), key=int, reverse=True):
        with suppress(OSError, ValueError, KeyError):
            if os.readlink(f"{files}/{number}").startswith(f"/memfd:{FACTS}"):
                candidates.append(one := Process(pid, number))
                if one.facts["folder"] != folder or not (one.is_rank or one.is_forked()):
                    candidates.pop().close()
    best = next((one for one in candidates if one.is_rank), candidates[0] if candidates else None)
    for one in candidates:
        if one is not best:
            one.close()
    return iter([best] if best else [])


def stats() -> Iterator[tuple[int, list[str]]]:
    """ID of each process, and what its ``stat`` has after the name: state, parent and so on."""
    for name in filter(re.compile("[0-9]+").fullmatch, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat") as file:
            yield int(name), file.read().rpartition(")")[2].split()


def children(pid: int) -> list[int]:
    """IDs of the processes that a process has started."""
    return [child for child, fields in stats() if fields[1] == str(pid)]


def usage(pids: Iterable[int]) -> tuple[float, int]:
    """Seconds of CPU of processes and of all that they have started, and bytes from and to storage devices."""
    found, family, before = dict(stats()), set(pids), 0
    while before != (before := len(family)):
        family |= {pid for pid, fields in found.items() if int(fields[1]) in family}
    ticks = sum(int(field) for pid in family & found.keys() for field in found[pid][11:15])
    return ticks / os.sysconf("SC_CLK_TCK"), sum(map(_stored, family))


def _stored(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/io") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("read_bytes", "write_bytes")))
    return 0


def has_begun(one: Process) -> bool:
    """Whether a process has done a batch of what its command is for, so that nothing is compiled first."""
    if one.facts["attempt"][0] == "train":
        return bool(one.facts.get("trained"))
    return bool(one.facts["saved"]) or any(one.facts.get("evaluated", ()))


def saved_files(folder: str) -> Iterator[tuple[str, int, int]]:
    """Path, size and time of each file of checkpoints and evaluations of a run."""
    for name in ("checkpoints", "evaluation"):
        for place, _, files in os.walk(f"{folder}/{name}"):
            for file in files:
                with suppress(OSError):
                    found = os.stat(f"{place}/{file}")
                    yield f"{place}/{file}", found.st_size, found.st_mtime_ns


def where(facts: dict[str, Any]) -> str:
    """Step and batch of a rank."""
    if "stage" not in facts or not facts["stage"]:
        return f"step {facts['step']}" if facts.get("step") else "before the first batch"
    evaluated = max(facts["evaluated"])
    if facts["stage"] in ("train", "fit"):
        return f"step {facts['step']}, epoch {facts['epoch']}, batch {facts['batch']}"
    return f"step {facts['step']}, epoch {facts['epoch']}, {facts['stage']}, batch {evaluated}"


def describe(processes: Sequence[Process]) -> list[dict[str, Any]]:
    """What each rank does, of processes that were asked: the place, the operation, and the stack of the main thread."""
    started = {_identity(one) for one in processes if one.is_rank and one.facts["joined"]}
    ranks = [one for one in processes if one.is_rank and (one.facts["joined"] or _identity(one) not in started)]
    waiting = [one.facts["attempt"] for one in ranks if one.collective]
    found = []
    for one in ranks:
        some_wait = one.facts["attempt"] in waiting
        workers = [other for other in processes if other.facts["pid"] == one.pid != other.pid]
        fact: dict[str, Any] = {key: one.facts.get(key) for key in ("rank", "pid", "host", "step", "epoch", "batch")}
        place = one.place
        fact |= {"at": where(one.facts), "waits_in": one.collective, "missing": some_wait and not one.collective}
        fact |= {"note": one.note, "file": place and place.file, "line": place and place.line}
        fact |= {"function": place and place.function, "place": str(place) if place else ""}
        fact["stack"] = [f'File "{frame.file}", line {frame.line} in {frame.function}' for frame in one.frames]
        stated = [(other.pid, [other.note, str(other.place or "")]) for other in workers]  # one may be stopped
        fact["workers"] = [{"pid": pid, "place": "; ".join(filter(None, each))} for pid, each in stated if any(each)]
        found.append(fact)
    return found


def _identity(one: Process) -> tuple[str, int]:
    return json.dumps(one.facts["attempt"]), one.facts["rank"]


def lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each rank, and for each of its workers, then their stacks, equal ones once."""
    shown = []
    for fact in found:
        waits = f"waits for other ranks in {fact['waits_in']}" if fact["waits_in"] else ""
        what = [waits or ("others wait for it" if fact["missing"] else ""), fact["note"], fact["place"]]
        shown.append(f"rank {fact['rank']} ({fact['at']}): {'; '.join(filter(None, what))}")
        shown += [f"  process {one['pid']} of rank {fact['rank']}: {one['place']}" for one in fact["workers"]]
    operations = {fact["waits_in"] for fact in found}
    if len(operations) > 1 and "" not in operations:
        shown.append("the ranks wait for one another in different operations")
    stacks: dict[tuple[str, ...], list[int]] = {}
    for fact in found:
        if fact["stack"]:
            stacks.setdefault(tuple(fact["stack"][:DEEPEST]), []).append(fact["rank"])
    for stack, ranks in stacks.items():
        shown += [f"stack of rank {', '.join(map(str, ranks))}, the last call first:", *(f"  {one}" for one in stack)]
    return shown


def log(processes: Sequence[Process], headline: str) -> None:
    """Append what all threads do to the logs of the ranks."""
    hide, opener = _library()
    for one in processes:
        if not one.text:
            continue
        folder = one.facts["folder"]
        kind = "" if one.is_rank else f", process {one.pid}"
        with suppress(OSError):
            os.makedirs(f"{folder}/logs", exist_ok=True)
            path = f"{folder}/logs/rank-{one.facts['rank']}.log"
            with open(path, "a", opener=opener(folder), encoding="utf-8") as file:
                place = one.place
                file.write(hide(f"{headline}\n{where(one.facts)}{kind}{f'; {place}' if place else ''}\n{one.text}\n"))


def _library() -> tuple[Any, Any]:
    """How secrets are hidden, and how files of a run are opened; imported only once there is something to report."""
    root = os.path.dirname(LIBRARY.rstrip(os.sep))
    if not sys.flags.no_site:
        from boltcutter.config.redaction import hide_variables
        from boltcutter.files import opener

        return hide_variables, opener
    import site

    site.main()
    if root not in sys.path:
        sys.path.insert(0, root)
    from boltcutter.config.redaction import hide_variables
    from boltcutter.files import opener

    return hide_variables, opener


class Watch:
    """Watches the processes of a run on this node, until all have ended.

    Args:
        folder: Of the run.
        timeout: Seconds without progress until it is reported; after twice as many the run is ended.
        leader: Process ID of local rank 0.
    """

    def __init__(self, folder: str, timeout: float, leader: int) -> None:
        self.folder, self.timeout, self.leader = folder, timeout, leader
        self.members: dict[int, Process] = {}
        self.seen: dict[int, tuple[str, float]] = {}  # of each process: its last facts, and since when
        self.withdrawn = set[int]()  # processes without an announcement at the last look
        self.attempt: Any = None
        self.failed = 0.0  # when a rank has failed or vanished; 0: none has
        self.reported = 0.0  # when a run without progress was; 0: not since it has made some
        self.ending = 0.0  # when processes were asked to end; 0: not yet
        self.saved: tuple[Any, float] = [], -math.inf  # files, and when they were looked at
        self.used: tuple[float, tuple[float, int]] = 0.0, (0.0, 0)  # time, and what the run had used of the machine
        self.next_scan, self.pause = 0.0, POLL_SECONDS

    def run(self) -> None:
        """Watch until no process is left."""
        begin = before = time.monotonic()
        while True:
            now = time.monotonic()
            if (gap := now - before) > SUSPENDED:
                self.seen = {pid: (facts, since + gap) for pid, (facts, since) in self.seen.items()}
                self.failed += gap if self.failed else 0
            before = now
            self.scan(now)
            self.update(now)
            if not self.members:
                self.next_scan = 0.0
                self.scan(now)
                is_waiting = self.attempt is None and now < begin + START_SECONDS
                if not self.members and not (is_waiting and os.path.exists(f"/proc/{self.leader}")):
                    return
            self.judge(now)
            poll = select.poll()
            for one in self.members.values():
                poll.register(one.pidfd, select.POLLIN)
                poll.register(one.signals, select.POLLIN)
            if any(event & select.POLLHUP for _, event in poll.poll(POLL_SECONDS * 1000)):
                time.sleep(0.1)  # a pipe that is closed is always ready
            if [one for one in self.members.values() if one.received(signal.SIGUSR2)]:
                self.report("SIGUSR2 asks where the ranks are")
                for one in self.members.values():  # to which a launcher has passed it on
                    one.received(signal.SIGUSR2)

    def scan(self, now: float, *, at_once: bool = False) -> None:
        """Look for further ranks of this attempt."""
        if self.failed or (now < self.next_scan and not at_once):
            return
        self.next_scan, self.pause = now + self.pause, min(2 * self.pause, MAX_SCAN)
        for one in find(self.folder, tuple(self.members)):
            if one.pid == self.leader:
                self.attempt = one.facts["attempt"]
            is_member = one.pid == self.leader or (self.attempt is not None and one.facts["attempt"] == self.attempt)
            if one.is_rank and is_member and one.facts["state"] != "done":
                self.members[one.pid], self.seen[one.pid] = one, ("", now)
            else:
                one.close()

    def update(self, now: float) -> None:
        """Read facts; forget processes that have ended."""
        for pid, one in list(self.members.items()):
            with suppress(ValueError):
                facts = json.dumps(one.read())
                if facts != self.seen[pid][0]:
                    self.seen[pid] = facts, one.facts["since"]
                    is_further = one.facts["since"] > self.reported and one.facts["state"] == "running"
                    if self.reported and is_further and not self.failed:
                        self.reported = 0.0
                        self.say([f"rank {one.facts['rank']} goes on: {where(one.facts)}"])
            if pid == self.leader and self.attempt != one.facts["attempt"]:
                self.attempt, self.next_scan, self.pause = one.facts["attempt"], 0.0, POLL_SECONDS
            state, alive = one.facts["state"], one.is_alive()
            if state == "failed" or (not alive and state != "done"):
                self.scan(now, at_once=True)  # for others that have just started
                self.failed = self.failed or now
            was_gone = pid in self.withdrawn
            if self._keeps(one):
                self.withdrawn.discard(pid)
            else:
                self.withdrawn.add(pid)
            # One that runs may be looked at while it announces itself anew.
            if not alive or (pid in self.withdrawn and (was_gone or state in ("done", "failed"))):
                del self.members[pid]
                self.withdrawn.discard(pid)
                one.close()
                if not alive and state != "done":
                    self.end_children(one.pid)

    def _keeps(self, one: Process) -> bool:
        """Whether a process has its announcement: one that goes on after its run, as a notebook, withdraws it."""
        with suppress(OSError):
            return os.path.samestat(os.stat(f"/proc/{one.pid}/fd/{one.facts['stacks']}"), os.fstat(one.stacks))
        return False

    def judge(self, now: float) -> None:
        """Report a run without progress, and end it after another timeout."""
        if not self.members:
            return
        idle = now - max(self.seen[pid][1] for pid in self.members)
        if self.ending and now - self.ending > END_SECONDS + GRACE and idle > GRACE:
            for one in self.members.values():  # such as one that hangs once more while it cleans up
                self.end_children(one.pid)
                one.send(signal.SIGKILL)
            return
        if self.failed and self.judge_failed(now):
            return
        quiet = max(self.timeout - EARLY, 0.6 * self.timeout)
        if idle < quiet / 2 or self.has_saved(now, idle) or idle < quiet:
            return
        if not self.reported:
            self.reported = now
            self.used = now, usage(self.members)
            self.report(
                f"no batch, validation batch or write to a checkpoint for {self.timeout:g} s (timeout={self.timeout:g})"
            )
        begun = any(map(has_begun, self.members.values()))
        frames = [frame.file for one in self.members.values() for frame in one.frames]
        if any(at in file for file in frames for at in DEBUGGERS):
            return
        if all(one.state() == "T" for one in self.members.values()):
            return  # somebody has stopped the whole run, to continue it later
        compiles = any(at in file for file in frames for at in COMPILERS)
        if idle > 2 * self.timeout and (
            (begun and not compiles) or idle > FIRST * self.timeout or not self.is_busy(now)
        ):
            found = self.report(
                f"no progress for {idle:.0f} s: the run is ended (timeout={self.timeout:g})", wakes=True
            )
            self.end(list(self.members.values()), found)

    def is_busy(self, now: float) -> bool:
        """Whether the run has used the machine in the last ``timeout``, as to prepare data before its first batch."""
        since, (cpu, stored) = self.used
        if now - since < self.timeout:
            return True
        self.used = now, usage(self.members)
        cpu_now, stored_now = self.used[1]
        # It is less where what it has started has ended.
        return abs(cpu_now - cpu) > BUSY * (now - since) or abs(stored_now - stored) > STORED

    def judge_failed(self, now: float) -> bool:
        """Report where the others of a failed rank are, and end them, if they stay there."""
        running = [(one, self.seen[pid][1]) for pid, one in self.members.items() if one.facts["state"] == "running"]
        # One that kept others waiting is ended before its launcher kills it, so that it ends what it has started.
        late = [
            one
            for one, since in running
            if now - max(self.failed, since) > (GRACE if now - since < 0.6 * self.timeout else HELD_GRACE)
        ]
        if late:
            self.end(late, self.report("a rank has failed, and others make no progress", wakes=True))
        return bool(late)

    def has_saved(self, now: float, idle: float) -> bool:
        """Whether files of checkpoints or evaluations have changed between two calls while ranks made no progress."""
        (before, checked), self.saved = self.saved, (sorted(saved_files(self.folder)), now)
        if checked < now - idle or self.saved[0] == before:
            return False
        self.seen = {pid: (facts, now) for pid, (facts, _) in self.seen.items()}
        return True

    def report(self, headline: str, *, wakes: bool = False) -> str:
        """Ask for stacks, and write them to the terminal and the logs; return the ranks' places in one line.

        Only a rank that is ended next is woken for that, since one that was stopped would go on.
        """
        self.scan(time.monotonic(), at_once=True)
        processes = [one for one in find(self.folder) if one.facts["attempt"] == self.attempt]
        ask(processes, wakes=wakes)
        for one in processes:
            if (member := self.members.get(one.pid)) is not None:
                member.frames = one.frames
        found = describe(processes)
        self.say([headline, *lines(found), f"stacks of all threads: {self.folder}/logs/"])
        log(processes, headline)
        for one in processes:
            one.close()
        places = [f"rank {fact['rank']} ({fact['at']}): {fact['place'] or fact['note']}" for fact in found]
        return f"{headline}; {'; '.join(places)}"

    def say(self, text: list[str]) -> None:
        """Print lines on the terminal of the run."""
        hide, _ = _library()
        shown = "".join("".join(c if c.isprintable() else "?" for c in line) + "\n" for line in text)
        with suppress(OSError, ValueError):
            print(hide(f"warning: {shown}"), end="", file=sys.stderr, flush=True)

    def end(self, processes: Sequence[Process], reason: str) -> None:
        """End processes, and those that they have forked: by an exception if they notice it, else by SIGKILL."""
        for one in processes:
            with suppress(OSError), open(f"/proc/{one.pid}/fd/{one.number}", "r+b", buffering=0) as file:
                write_text(file.fileno(), MESSAGE, reason)
            if one.handles(END):
                one.send(END)
            if one.state() == "T":
                one.send(signal.SIGCONT)
        end = time.monotonic() + END_SECONDS
        while time.monotonic() < end and any(self._is_running(one) for one in processes):
            time.sleep(0.1)
        for one in processes:
            if self._is_running(one):
                self.end_children(one.pid)
                one.send(signal.SIGKILL)
        self.ending = time.monotonic()
        self.failed = self.failed or time.monotonic()

    def _is_running(self, one: Process) -> bool:
        with suppress(ValueError):
            one.read()
        return one.is_alive() and one.facts["state"] == "running"

    def end_children(self, pid: int) -> None:
        """Kill what a process has forked or spawned, such as workers of a loader; not the commands that it runs."""
        for one in find(self.folder):
            if one.facts["pid"] == pid and not one.is_rank:
                one.send(signal.SIGKILL)
            one.close()
        for child in children(pid):
            with suppress(OSError):
                with open(f"/proc/{child}/cmdline", "rb") as file:
                    is_spawned = b"multiprocessing.spawn" in file.read()
                if is_spawned:
                    os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    if os.fork():
        os._exit(0)  # so that the rank which has started this process need not wait for it
    Watch(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])).run()
