"""Standard output and error whose reader may disappear, as with ``| head`` or a closed terminal, while work goes on."""

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
    """Replace standard output and error by streams that ignore errors of writing, unless they are replaced already."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            continue  # closed, or captured by a test or a notebook
        if isinstance(getattr(stream.buffer, "raw", stream.buffer), LenientFile):
            continue
        stream.flush()
        lenient = io.TextIOWrapper(
            io.BufferedWriter(LenientFile(stream.fileno(), "w", closefd=False)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lenient)
        setattr(sys, f"__{name}__", lenient)
