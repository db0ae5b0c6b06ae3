"""Which files of the template go with those that are dropped, and what tells of them in what stays."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from project.names import OWN

SRC = f"src/{OWN}"


class Gone:
    """Files that are dropped.

    Args:
        files: All paths of the template, with their text.
        patterns: Of files to drop; one that begins with ! keeps what an earlier one took.
        words: Regular expressions for what documents then need not tell.
    """

    def __init__(self, files: Mapping[str, str], patterns: Collection[str], words: Collection[str] = ()) -> None:
        self.all, self.files = files, set[str]()
        for pattern in patterns:
            if pattern.startswith("!"):
                self.files = {file for file in self.files if not fnmatchcase(file, pattern[1:])}
            else:
                self.files |= {file for file in files if fnmatchcase(file, pattern)}
        while needed := self._imported():
            self.files -= needed
        while more := self._widowed():
            self.files |= more
        self.mention = re.compile("|".join(self._mentions()) or r"(?!)")
        self.telling = re.compile("|".join([*self._mentions(), *self._links(), *filter(None, words)]) or r"(?!)")
        self.headings = re.compile("|".join(filter(None, words)) or r"(?!)")

    def empties(self, folder: str) -> bool:
        """Whether a folder had something else than __init__.py, and nothing is left of it."""
        inside = [file for file in self.all if file.startswith(f"{folder}/") and not file.endswith("/__init__.py")]
        return bool(inside) and self.files.issuperset(inside)

    def _imported(self) -> set[str]:
        """Sources that were to go, but that others import which stay."""
        staying = "".join(text for file, text in self.all.items() if file not in self.files and file.startswith(SRC))
        found = re.findall(rf"^ *from {OWN}((?:\.\w+)*) import (.*)", staying, re.M)
        paths = {f"{SRC}{module.replace('.', '/')}" for module, _ in found}
        paths |= {
            f"{SRC}{module.replace('.', '/')}/{name}" for module, names in found for name in re.findall(r"\w+", names)
        }
        core = "".join(
            text for file, text in self.all.items() if re.fullmatch(rf"{SRC}/\w+\.py", file) and file not in self.files
        )
        paths |= {f"{SRC}{name.replace('.', '/')}" for name in re.findall(rf"\"{OWN}((?:\.[a-z_0-9]+)+)", core)}
        return {f"{path}.py" for path in paths} & self.files

    def _widowed(self) -> set[str]:
        """What makes no sense without a file that is dropped."""
        mention = re.compile("|".join(self._mentions()) or r"(?!)")
        found = set()
        for file in self.all.keys() - self.files:
            path = PurePosixPath(file)
            parts = path.parts
            if parts[0] == "configs":
                going = self._is_option_of_gone(file, mention)
            elif parts[0] == "tests" and path.name.startswith("test_"):
                source = f"{SRC}/{'/'.join(parts[1:-1])}/{path.name[5:]}".replace("//", "/")
                going = source in self.files or self.empties(f"{SRC}/{parts[1]}")
            elif parts[0] == "tests" and len(parts) > 2:
                going = self.empties(f"{SRC}/{parts[1]}")
            elif parts[0] == "docs":
                going = any(
                    other.startswith(f"{SRC}/") and PurePosixPath(other).stem == path.stem for other in self.files
                )
            elif parts[0] == "scripts" and len(parts) == 2 and path.suffix == ".py":
                going = bool(re.search(rf"^from (?:{mention.pattern})|f?\"(?:{mention.pattern})", self.all[file], re.M))
            elif file.startswith("scripts/project/parts/"):
                going = self.empties(f"{SRC}/{parts[3]}")
            else:
                going = path.name == "__init__.py" and self.empties(str(path.parent))
            if going:
                found.add(file)
        return found

    def _is_option_of_gone(self, file: str, mention: re.Pattern[str]) -> bool:
        """Whether an option makes an object of a class, or chooses an option, that is dropped."""
        text = self.all[file]
        if PurePosixPath(file).name in ("default.yaml", "train.yaml"):  # these are what everything begins with
            return False
        if re.search(rf"_target_: (?:{mention.pattern})", text):
            return True
        group = PurePosixPath(file).parent.name
        chosen = re.search(r"^defaults:(.*\n(?:[ ].*\n)*)", text, re.M)
        if not chosen:
            return False
        pairs = re.findall(r"^  (\w+): (.*)$", chosen[1], re.M) or [(group, chosen[1])]
        options = [(key, option) for key, value in pairs for option in re.findall(r"\w+", value.partition("#")[0])]
        return any(f"configs/{key}/{option}.yaml" in self.files for key, option in options)

    def _mentions(self) -> list[str]:
        """Regular expressions for how code, commands and documents name what is dropped."""
        found = []
        for file in sorted(self.files):
            path = PurePosixPath(file)
            found.append(rf"(?<![\w/]){re.escape(file)}(?!\w)")
            if file.startswith(f"{SRC}/") and path.suffix == ".py" and path.name != "__init__.py":
                module = ".".join(path.with_suffix("").parts[1:])
                package, _, name = module.rpartition(".")
                found.append(rf"{re.escape(module)}(?!\w)")
                found.append(rf"from {re.escape(package)} import (?:\w+, )*{name}\b")
            elif path.match("configs/*/*.yaml"):
                group, name = path.parent.name, path.stem
                found.append(rf"(?<![\w.]){group}=\[?(?:\w+,)*{name}(?![\w.])")
                found.append(rf"(?<![\w/]){group}\.{name}(?=[.=])")
            elif path.match("scripts/*.py"):
                found.append(rf"\bscript\(\s*\"{path.stem}\"")
            elif path.match("tests/*.py"):
                found.append(rf"(?:from|import) {path.stem}\b")
        for folder in sorted({str(PurePosixPath(file).parent) for file in self.files}):
            if folder.startswith(f"{SRC}/") and self.empties(folder):
                room = PurePosixPath(folder).name
                found.append(rf"{OWN}\.{room}(?!\w)|(?:src/{OWN}|tests)/{room}\b")
            elif folder.startswith("configs/") and self.empties(folder):
                found.append(rf"(?<![\w.+~/]){PurePosixPath(folder).name}(?:=|\.\w+=|\.…)")
        return found

    def _links(self) -> list[str]:
        names = [re.escape(PurePosixPath(file).name) for file in self.files if file.startswith("docs/")]
        return [rf"\]\([^)]*\b(?:{'|'.join(sorted(names))})[#)]"] if names else []
