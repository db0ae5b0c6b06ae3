"""Report what a process does that reading a file of somebody else must not do, by an audit hook.

Source: https://docs.python.org/3/library/audit_events.html
"""

import os
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

FORBIDDEN = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn"}
FORBIDDEN |= {
    "socket.connect",
    "socket.sendto",
    "socket.getaddrinfo",
    "urllib.Request",
    "ctypes.dlopen",
    "os.startfile",
}
CHANGING = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Modules that execute text of their own: definitions of data classes, named tuples and methods.
GENERATORS = ("dataclasses.py", "collections/__init__.py", "attr/_make.py", "importlib/_bootstrap", "<frozen importlib")


class Audit:
    """Records events while it is active.

    Args:
        scratch: Folder in which files may be written.
        packages: Top-level packages that may be imported besides those of Python and those that are imported already.
        programs: Patterns of the first arguments of commands that may be run.
    """

    def __init__(self, scratch: Path, packages: set[str], *programs: list[str]) -> None:
        self.programs = programs
        self.scratch, self.packages = str(scratch), packages | sys.stdlib_module_names
        self.is_active = self.is_wanted = False
        self.found = list[str]()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_active and self._is_forbidden(event, arguments):
            self.is_active = False  # to format the arguments may cause events
            self.found.append(f"{event} {arguments!r:.200}")
            self.is_active = True

    def _is_forbidden(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "subprocess.Popen":
            return not any(all(map(fnmatch, map(str, arguments[1]), program)) for program in self.programs)
        if event in FORBIDDEN:
            return arguments != (None,)  # ctypes.dlopen of this process
        if event in CHANGING or (event == "open" and self._writes(*arguments[1:3])):
            return isinstance(arguments[0], str | bytes | os.PathLike) and not self._is_scratch(arguments[0])
        if event == "import":
            top = str(arguments[0]).partition(".")[0]
            return top not in self.packages and top not in sys.modules
        if event == "exec":
            return str(getattr(arguments[0], "co_filename", "<")).startswith("<") and not self._is_generated()
        return False

    def _writes(self, mode: Any, flags: Any) -> bool:
        return bool(set(mode or "") & set("wax+")) or bool(isinstance(flags, int) and flags & WRITING)

    def _is_scratch(self, path: Any) -> bool:
        place = os.path.abspath(os.fsdecode(path))
        return place.startswith((self.scratch, "/dev/null", "/dev/shm", "/proc/self")) or "/__pycache__/" in f"{place}/"

    def _is_generated(self) -> bool:
        frame = sys._getframe()
        while frame := frame.f_back:  # type: ignore[assignment]
            if any(name in frame.f_code.co_filename for name in GENERATORS):
                return True
        return False
