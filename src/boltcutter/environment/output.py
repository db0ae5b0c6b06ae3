"""Standard output and error that never end a training, and show what files of others say as text.

Their reader may disappear, as with ``| head`` or a closed terminal; they may be closed from the start, as by ``>&-``,
or have an encoding that lacks characters. What a terminal would execute is escaped here, for all that is printed.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe has ended, or a terminal was closed
ERASE = "\r\x1b[2K"  # control sequence of ECMA-48: the line
BOLD, NORMAL = "\x1b[1m", "\x1b[0m"
# What a terminal executes, or by which text is not what it seems: control characters but line ends and tabs, the marks
# that reverse the direction of text, and bytes that are no text.
CONTROL = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
# This library prints names and messages of files, and no other control sequences but these.
ESCAPED = re.compile(f"({'|'.join(map(re.escape, (ERASE, BOLD, NORMAL)))})|{CONTROL}")
# Other packages draw progress bars: colors, movements of the cursor by lines and columns, and links.
ESCAPED_ELSEWHERE = re.compile(
    r"(\x1b\[[0-9;:]*[mABCDEFGK]|\x1b\[0?J|\x1b\[\?(?:25|7|2026)[hl]|\x1b\]8;[^\x00-\x1f\x7f-\x9f]*(?:\x1b\\|\x07)|[\r\x08])"
    f"|{CONTROL}"
)
COLORED = re.compile(f"(\x1b\\[[0-9;:]*m)|{CONTROL}")  # lines of logging
LIBRARY = __name__.partition(".")[0]
STREAMS = tuple(f"{LIBRARY}.{name}" for name in ("environment.output", "run.log", "callback.status_line"))
REPORTING = ("", LIBRARY, "warnings", "traceback")  # packages that print messages of files


def escaped(text: str, caller: FrameType | None) -> str:
    """Text as it may be printed: control characters are shown, but in sequences that progress bars need.

    Args:
        text: What is written to a stream.
        caller: Who writes it; None: Python itself, as for an exception.
    """
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    while caller is not None and caller.f_globals.get("__name__") in STREAMS and caller.f_back is not None:
        caller = caller.f_back
    package = "" if caller is None else str(caller.f_globals.get("__name__")).partition(".")[0]
    pattern = ESCAPED if package in REPORTING else COLORED if package == "logging" else ESCAPED_ELSEWHERE
    return pattern.sub(lambda found: found[1] or found[0].encode("unicode_escape").decode(), text)


class Terminal(io.TextIOWrapper):
    """A stream that escapes what a terminal would execute.

    Attributes:
        hide: Masks secrets in what is written; commands set it.
        shown: A value that is written to be read, such as the token of a page that this process serves.
    """

    hide: ClassVar[Callable[[str], str]] = str
    shown: ClassVar[str] = ""

    def write(self, text: str) -> int:
        """Write text, in which control characters are shown."""
        kind = type(self)
        masked = text if kind.shown and kind.shown in text else kind.hide(text)
        super().write(escaped(masked, sys._getframe().f_back))
        return len(text)


class LenientFile(io.FileIO):
    """A file that ignores errors of writing, which must not end a training.

    Attributes:
        is_lost: Whether the reader of any such file is gone.
    """

    is_lost = False

    def write(self, data: Any) -> Any:
        """Write; once the reader is gone, here and in native code nothing is written any more."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in GONE:
                LenientFile.is_lost = True
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self.fileno())
                os.close(nothing)
            return len(data)


def ignore_lost_readers() -> None:
    """Replace standard output and error by streams that ignore errors of writing, unless they are replaced already.

    Characters that their encoding lacks, as under ``PYTHONIOENCODING=ascii``, become question marks.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # it was closed when Python started
            stream = _open_nowhere(number)
        elif not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            continue  # captured by a test or a notebook
        elif isinstance(getattr(stream.buffer, "raw", stream.buffer), LenientFile):
            continue
        stream.flush()
        lenient = Terminal(
            io.BufferedWriter(LenientFile(stream.fileno(), "w", closefd=False)),
            encoding=stream.encoding,
            errors="replace" if stream.errors == "strict" else stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lenient)
        setattr(sys, f"__{name}__", lenient)


def _open_nowhere(number: int) -> io.TextIOWrapper:
    """A stream that discards what is written; the descriptor is taken, so that no file of the run gets its number."""
    try:
        os.fstat(number)
    except OSError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        if nothing != number:
            os.dup2(nothing, number)
            os.close(nothing)
        return open(number, "w", encoding="utf-8", closefd=False)
    return open(os.devnull, "w", encoding="utf-8")  # a file of this process has the number already
