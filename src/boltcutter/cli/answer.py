"""``--json``: one JSON object on standard output when a command has ended; what it prints goes to standard error."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

from boltcutter import run_files
from boltcutter.cli.file_fix import locate
from boltcutter.cli.mistake import Explanation, explain
from boltcutter.cli.table import commands
from boltcutter.cli.translate import translate
from boltcutter.config.errors import ConfigError, Mistake, one_line
from boltcutter.config.redaction import MASK, hide_variables
from boltcutter.environment.process import is_rank_zero
from boltcutter.environment.stop_signals import PreemptionError
from boltcutter.extend import NegativeResult
from boltcutter.project import Project, ProjectError
from boltcutter.run.folder import read_record
from boltcutter.run.remote.store import run_store

RECORD = ("stopped_by", "metrics", "test", "findings")  # what a program wants to know of a run at its end
FLAG = "--json"


def answer(name: str, arguments: Sequence[str], call: Callable[[list[str]], Any], start: str | None = None) -> None:
    """Run a command of the project at ``start``, and print the object: on rank zero of several ranks."""
    others = [argument for argument in arguments if argument != FLAG]
    status, errors, result = 0, list[Explanation](), None
    try:
        with _printing_to_stderr() as text:
            try:
                result = call(others)
            except SystemExit as end:
                result = end.result if isinstance(end, NegativeResult) else None
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
                errors = _explain(end, name, others, status, start)
                raise
            except Exception as error:
                status, errors = 1, [failure("internal_error", f"{type(error).__name__}: {one_line(error)}")]
                raise
    finally:
        if is_rank_zero() and sys.exc_info()[0] is not KeyboardInterrupt:
            shown = {"output": text.getvalue().splitlines()} if result is None else {"result": described(result)}
            found = {"command": name, "ok": status == 0, "exit_status": status, **shown}
            print(
                hide_variables(json.dumps({**found, "errors": [asdict(_masked(error)) for error in errors]})),
                flush=True,
            )


def _explain(end: SystemExit, name: str, arguments: Sequence[str], status: int, start: str | None) -> list[Explanation]:
    """The errors that end a command; none if its exit status is its result."""
    if isinstance(end, PreemptionError):
        return [failure("interrupted", end.reason)]
    if end.__context__ is None or not status:
        return []
    text = run_store().show(str(end.__context__))
    arguments = arguments if name in commands() else [name]
    if isinstance(end.__context__, ConfigError):
        project = Project.find(start)
        translated = [(word, argument) for argument in arguments for word in _translated(project, name, argument)]
        words, given = [word for word, _ in translated], dict(translated)
        shown = [line.mapped(run_store().show) for line in end.__context__.mistakes]
        mistakes = [locate(explain(line, words), project, words) for line in shown]
        return [replace(one, replaces=tuple(given.get(word, word) for word in one.replaces)) for one in mistakes]
    if isinstance(end.__context__, ProjectError):
        return [explain(Mistake(one_line(text), "invalid_file"), arguments)]
    return [failure("failed", text)]


def _translated(project: Project, name: str, argument: str) -> list[str]:
    """An argument of another template in our words, which errors name; others as they are."""
    with suppress(ConfigError):
        return list(translate(project, name, [argument])[1])
    return [argument]


def failure(code: str, text: str) -> Explanation:
    """An error that is not about a setting."""
    problem, _, remedy = text.rpartition("; ")
    return Explanation(code, "", None, text, remedy if problem else None, None)


@contextmanager
def _printing_to_stderr() -> Iterator[io.StringIO]:
    """Send standard output, also that of processes which are started, to standard error; keep what is printed here."""
    text = _Copy()
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(text):
            yield text
    finally:
        os.dup2(before, 1)
        os.close(before)


class _Copy(io.StringIO):
    """Text that is also written to standard error."""

    def write(self, text: str) -> int:
        sys.stderr.write(text)
        return super().write(text)


def described(result: Any) -> Any:
    """The result of a command as JSON can express it; of a run its folder, status and metrics."""
    if not isinstance(result, Path):
        return plain(result)
    record = read_record(result) if (result / run_files.RECORD).is_file() else {}
    status = {"status": attempts[-1].get("reason")} if (attempts := record.get("attempts")) else {}
    found = {key: plain(record[key]) for key in RECORD if key in record}
    return {"folder": run_store().show(str(result)), **status, **found}


def plain(value: Any) -> Any:
    """A value as JSON can express it: NaN and infinity are null."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | int | None):
        return value
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def _masked(error: Explanation) -> Explanation:
    """A mistake without the secret that an argument holds: its answer goes to logs, and to agents."""
    if error.code != "secret":
        return error
    replaces = tuple(
        f"{key}={MASK}" if equals else key for key, equals, _ in (w.partition("=") for w in error.replaces)
    )
    return replace(error, value=error.value and MASK, replaces=replaces)
