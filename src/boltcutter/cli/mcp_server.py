"""``boltcutter mcp``: commands as tools of the Model Context Protocol, over standard input and output.

Each tool runs the command line with ``--json`` in a process of its own with a time limit, so it can do nothing else.

Source: https://modelcontextprotocol.io
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from html import unescape
from pathlib import Path
from typing import Any

from boltcutter import files, run_files
from boltcutter.cli.answer import failure
from boltcutter.config.errors import ConfigError, hint
from boltcutter.config.values import split_overrides
from boltcutter.environment.startup import PARENT_PID, TRY_LIMITS
from boltcutter.formatting import format_limit, parse_count
from boltcutter.project import Project, install_command
from boltcutter.run import trust

LIMIT, GRACE = 300.0, 60.0  # seconds for a command, and after its time to save and to write a report
MAX_REPORT, MAX_LENGTH = 20_000, 30_000  # characters of a report, and of all arguments of a command
RUN_LIMITS = {"max_runs": 200, "max_runs_per_hour": 30}  # of tries, by default
HIDDEN = re.compile(r"<(script|style|svg|head)\b", re.I)  # what is no text of a report
INSTRUCTIONS = """Arguments are overrides such as "model=mlp" and "trainer.max_epochs=3". Check them before training.
An error has a `code` and, where there is one, a `fix`: write it in place of the arguments in `replaces`, and try again.
If it has a `file`, these are its lines from `line` on.
Choose models by validation metrics; the test split is for the last comparison."""


def mcp_command(project: Project, arguments: list[str]) -> None:
    """Serve until the client disconnects."""
    given, rest = split_overrides(arguments, *RUN_LIMITS)
    if rest:
        raise ConfigError(
            f"{rest[0]}: mcp takes no such argument{hint(rest[0], RUN_LIMITS)}; remove it", kind="unknown_key"
        )
    limits = {key: parse_count(given.get(key, str(value))) for key, value in RUN_LIMITS.items()}
    if wrong := next((key for key, value in limits.items() if value is None), ""):
        raise ConfigError(f"{wrong}={given[wrong]}: not a number of runs; try {wrong}={RUN_LIMITS[wrong]}")
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError:
        raise ConfigError(
            f"mcp: not installed, but needed by this command; {install_command('mcp')}", kind="not_installed"
        ) from None
    tools = Tools(project.root, max_runs=limits["max_runs"], max_runs_per_hour=limits["max_runs_per_hour"])
    server = MCPServer("boltcutter", instructions=INSTRUCTIONS, log_level="WARNING")
    for tool in (
        tools.list_runs,
        tools.compare,
        tools.check,
        tools.train,
        tools.try_change,
        tools.tries,
        tools.read_report,
    ):
        server.tool()(tool)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, tools.end)
    server.run("stdio")


class Tools:
    """The tools; their docstrings are what a client shows.

    Args:
        root: Folder of the project.
        limit: Seconds for a command that does not train.
        grace: Seconds for a command to end after its time.
        max_runs: Runs of all tries of the project, which no argument of a tool can raise.
        max_runs_per_hour: The same within an hour.
    """

    def __init__(
        self,
        root: Path,
        *,
        limit: float = LIMIT,
        grace: float = GRACE,
        max_runs: int | None = None,
        max_runs_per_hour: int | None = None,
    ) -> None:
        counts = {"max_runs": max_runs, "max_runs_per_hour": max_runs_per_hour}
        found = {key: RUN_LIMITS[key] if value is None else value for key, value in counts.items()}
        self.run_limits = f"{found['max_runs_per_hour']}/{found['max_runs']}"
        self.root, self.limit, self.grace, self.running = root, limit, grace, set[int]()
        self.starting = self.ending = 0  # commands whose process is not known yet; the signal that waits for them

    def end(self, number: int, _: object) -> None:
        """End the commands as well if a client ends the server by a signal, also those that start at this moment."""
        self.ending = number
        if self.starting:
            return
        for group in self.running:
            _signal(group, signal.SIGTERM)
        os._exit(128 + number)

    async def list_runs(self, filter: str = "", sort: str = "") -> dict[str, Any]:
        """List runs with settings and metrics, such as filter="val/accuracy>0.9 and model=mlp", sort="val/loss"."""
        return await self.run("runs", *([filter] if filter else []), options={"sort": sort} if sort else {})

    async def compare(self, metric: str, groups: list[str]) -> dict[str, Any]:
        """Say whether the second group of runs is better in a metric, or was lucky; groups are filters of runs."""
        return await self.run("compare", *groups, options={"metric": metric})

    async def check(self, overrides: list[str]) -> dict[str, Any]:
        """Check a configuration without training; mistakes come with their corrections."""
        return await self.run("check", *overrides)

    async def train(self, overrides: list[str], minutes: float = 10) -> dict[str, Any]:
        """Train for at most some minutes; the result has the folder of the run and its metrics.

        The test split is not read, unless the overrides have test=true.
        """
        if not 0 < minutes < 1e6:
            return _failed("failed", f"minutes={minutes} is not a time; use a positive number")
        seconds = max(round(minutes * 60), 1)
        sealed = [] if any(override.startswith("test=") for override in overrides) else ["test=false"]
        limits = [*sealed, *overrides, f"trainer.max_time={format_limit(seconds)}"]
        return await self.run("train", *limits, seconds=seconds + self.grace)

    async def try_change(
        self,
        overrides: list[str],
        metric: str,
        effect: str,
        against: str = "",
        budget: int = 12,
        minutes: float = 60,
    ) -> dict[str, Any]:
        """Accept or reject a change in pairs of runs; the honest way to decide whether it is better.

        The effect is the smallest improvement worth having, such as "0.5%" or "0.01"; against is the baseline. Call
        again with the same arguments to continue. The number of runs is limited, and the test split is not read.
        """
        if not 0 < minutes < 1e6:
            return _failed("failed", f"minutes={minutes} is not a time; use a positive number")
        words = [
            f"metric={metric}",
            f"effect={effect}",
            f"budget={budget}",
            *([f"against={against}"] if against else []),
        ]
        return await self.run("try", *overrides, *words, seconds=max(minutes * 60, 1))

    async def tries(self) -> dict[str, Any]:
        """List the changes that were tried, and whether they were accepted."""
        return await self.run("tries")

    async def read_report(self, run: str) -> dict[str, Any]:
        """Read the report of a run as text; the run is its id, the beginning of one, or "latest"."""
        found = await self.run("runs")
        runs = [entry for entry in found.get("result", ()) if _is_named(run, entry)]
        if not found["ok"] or not runs:
            return found if not found["ok"] else _failed("unknown_run", f"run={run}: no such run; list_runs has all")
        report = Path(runs[-1]["folder"], run_files.REPORT)
        if (
            not report.is_file() or report.is_symlink() or files.foreign_link(report)
        ):  # somebody else's link may lead to any file
            return _failed("failed", f"run={run}: has no report yet; train with report=true")
        try:
            text = as_text(trust.read_bytes(report).decode(errors="replace"))
        except (OSError, ValueError) as error:
            return _failed("failed", f"run={run}: its report cannot be read ({error})")
        return {"ok": True, "folder": str(report.parent), "text": text[:MAX_REPORT]}

    async def run(
        self, *arguments: str, seconds: float | None = None, options: Mapping[str, str] = {}
    ) -> dict[str, Any]:
        """Run a command.

        Args:
            arguments: Of ``boltcutter``, without ``--json``; none may be an option, which could write to any file, or
                grant trust.
            options: Options by name; their values may begin with ``-``, as ``sort``.
            seconds: After which it is asked to save and to end; it is killed if that takes longer than the grace.
        """
        for argument in (given := (*arguments, *options.values())):
            is_option = argument in arguments and re.match(r"-|\+*trust=", argument)
            if not argument.isprintable() or is_option or sum(map(len, given)) > MAX_LENGTH:
                return _failed("failed", f"{argument[:100]!a}: not an argument of this tool, or too long; leave it out")
        arguments += tuple(f"--{name}={value}" for name, value in options.items())
        self.starting += 1
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "boltcutter", *arguments, "--json"),
                cwd=self.root,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                # If the server is killed, it saves.
                env={
                    **os.environ,
                    trust.AGENT: "1",
                    TRY_LIMITS: self.run_limits,
                    PARENT_PID: f"{os.getpid()}:{signal.SIGTERM:d}",
                },
            )
            self.running.add(process.pid)
        finally:
            self.starting -= 1
            if self.ending:
                self.end(self.ending, None)
        reading = asyncio.ensure_future(process.communicate())
        try:
            for number, wait in ((signal.SIGTERM, seconds or self.limit), (signal.SIGKILL, self.grace)):
                done, _ = await asyncio.wait([reading], timeout=wait)
                if done:
                    break
                _signal(process.pid, number)
            text = (await reading)[0].decode()
        finally:
            self.running.discard(process.pid)
            if process.returncode is None:  # the client cancelled the call
                _signal(process.pid, signal.SIGTERM)
        try:
            return dict(json.loads(text))
        except ValueError:
            limit = seconds or self.limit
            return _failed("failed", f"{arguments[0]}: ended without a result, maybe after {limit:g} s; give more time")


def _is_named(run: str, entry: dict[str, Any]) -> bool:
    """Whether a run may be meant; of several, the newest is."""
    is_trial = bool(entry.get("parent"))
    names = (entry["id"], entry["id"].rpartition("-")[2])
    return is_trial == ("/" in run) and (run == "latest" or any(name.startswith(run) for name in names))


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _failed(code: str, message: str) -> dict[str, Any]:
    return {"ok": False, "errors": [asdict(failure(code, message))]}


def as_text(html: str) -> str:
    """The text of a report, a line for each row of a table."""
    parts, place = list[str](), 0
    while begin := HIDDEN.search(html, place):  # each character is read once: somebody else's report may end no part
        end = re.compile(f"</{begin[1]}>", re.I).search(html, begin.end())
        parts.append(html[place : begin.start()])
        place = end.end() if end else len(html)
    plain = re.sub(r"</(tr|p|h[0-9]|li|div|pre)>", "\n", "".join([*parts, html[place:]]).replace("\n", " "))
    lines = (" ".join(line.split()) for line in unescape(re.sub(r"<[^<>]*>", " ", plain)).splitlines())
    return "\n".join(line for line in lines if line)
