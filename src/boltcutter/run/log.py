"""Log the output of each process of a run to a file."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from boltcutter import files
from boltcutter.config.errors import ConfigError
from boltcutter.config.redaction import hide_variables
from boltcutter.environment.output import escaped


@contextmanager
def capture_output(folder: Path, rank: int) -> Iterator[None]:
    """Copy standard output and standard error of this process to ``logs/rank-<rank>.log``."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    file = folder / "logs" / f"rank-{rank}.log"
    try:
        log = open(file, "a", buffering=1, opener=files.opener(folder))  # noqa: SIM115 - closing must not fail
    except OSError as error:
        raise ConfigError(
            f"folder={folder}: {file.name} in logs cannot be written ({error.strerror}); remove it"
        ) from error
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(TextIO, _Tee(sys.stdout, log)), cast(TextIO, _Tee(sys.stderr, log))
    try:
        yield
    except BaseException:
        with suppress(OSError):
            log.write(escaped(hide_variables(traceback.format_exc()), None))
        raise
    finally:
        sys.stdout, sys.stderr = before
        with suppress(OSError):
            log.close()


class _Tee:
    """A stream that also writes to a log file, and ignores errors of the latter, such as a full disk.

    In both, values of secret variables are masked: what is printed goes to logs of launchers and of W&B, too. Control
    characters are escaped, which a terminal would execute that shows the log.
    """

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self.stream, self.log = stream, log

    def write(self, text: str) -> int:
        hidden = escaped(hide_variables(text), sys._getframe().f_back)
        with suppress(OSError):
            self.log.write(hidden)
        self.stream.write(hidden)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
