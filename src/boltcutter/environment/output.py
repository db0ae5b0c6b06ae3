"""Standard output and error that never end a training.

Their reader may disappear, as with ``| head`` or a closed terminal; they may be closed from the start, as by ``>&-``,
or have an encoding that lacks characters.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe has ended, or a terminal was closed


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
        lenient = io.TextIOWrapper(
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
