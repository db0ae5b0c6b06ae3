"""Add a component or an experiment to a project: code, YAML and a passing test."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from boltcutter.config.errors import ConfigError, hint
from boltcutter.project import Project

PARTS = Path(__file__).parent / "parts"
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
KINDS = sorted(folder.name for folder in PARTS.iterdir())
EXAMPLES = {"data": "image", "model": "regression", "task": "image"}  # without --kind


def add_command(project: Project, arguments: list[str]) -> None:
    """Write the files of a new component and print their paths.

    Args:
        project: Project to add to.
        arguments: Kind of component and name, such as ``model tiny``; ``--kind`` selects the example.

    Raises:
        ConfigError: Kind or name is wrong, or a file exists already.
    """
    example, words = split_flag(" ".join(arguments).split(), "--kind")
    if len(words) != 2:
        raise ConfigError(
            "kind and name: missing, or more than these; write `boltcutter add model tiny`", kind="missing_value"
        )
    kind, name = words
    if kind not in KINDS:
        raise ConfigError(
            f"add {kind}: no such kind{hint(kind, KINDS)} (there are: {', '.join(KINDS)})", kind="unknown_option"
        )
    examples = sorted(folder.name for folder in (PARTS / kind).iterdir() if folder.is_dir())
    if example is not None and example not in examples:
        listed = f" (there are: {', '.join(examples)})" if examples else "; leave it out"
        raise ConfigError(f"--kind={example}: add {kind} has no such example{hint(example, examples)}{listed}")
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        near = re.sub(r"\W", "_", name.lower())
        near = near if NAME.fullmatch(near) and not keyword.iskeyword(near) else "tiny"
        raise ConfigError(f"add {kind} {name}: {name} is not a lower-case Python identifier; try {near}")
    files = render_component(kind, name, require_package(project), example)
    if existing := [file for file in files if (project.root / file).exists()]:
        raise ConfigError(f"add {kind} {name}: {existing[0]} exists already; choose another name")
    write_files(project.root, files)


def split_flag(arguments: list[str], flag: str) -> tuple[str | None, list[str]]:
    """Return the value of the only flag that a command has, and the other arguments; another flag is refused."""
    value, rest, words = None, list[str](), iter(arguments)
    for word in words:
        name, equals, text = word.partition("=")
        is_flag = name == flag or (equals and f"--{name}" == flag)
        if not is_flag and not word.startswith("-"):
            rest.append(word)
            continue
        value = text if equals else next(words, "")
        if not is_flag:
            near = f"; did you mean {flag}={value}?" if hint(name, [flag]) else ""
            raise ConfigError(f"{name}={value}: no such flag{near} (there is: {flag})", kind="unknown_flag")
    return value, rest


def render_component(kind: str, name: str, package: str, example: str | None = None) -> dict[Path, str]:
    """Return the text of each new file by its path in the project; ``example`` is one of several of a kind."""
    module = f"{package}.{kind}"
    paths = {
        "source.py.txt": Path("src", *module.split("."), f"{name}.py"),
        "option.yaml.txt": Path("configs", kind, f"{name}.yaml"),
        "test.py.txt": Path("tests", kind, f"test_{name}.py"),
    }
    values = {f"PACKAGE.{kind}": module, "PACKAGE": package, "NAME": name, "CLASS": name.title().replace("_", "")}
    values["ROOT"] = str(len(paths["test.py.txt"].parts) - 1)  # the project's root among the parents of the test
    return {
        paths[part.name]: re.sub(rf"\b({'|'.join(values)})\b", lambda match: values[match[0]], part.read_text())
        for part in sorted((PARTS / kind / (example or EXAMPLES.get(kind, ""))).iterdir())
    }


def require_package(project: Project) -> str:
    """Return the name of the project's own package.

    Raises:
        ConfigError: ``pyproject.toml`` does not name it.
    """
    if not project.package:
        raise ConfigError(f"{project.root} is not a project with a package; create one by `boltcutter new my-project`")
    return project.package


def write_files(root: Path, files: dict[Path, str]) -> None:
    """Write files of the project and print their paths; a new folder of source code becomes a package."""
    for file, text in files.items():
        folder = (root / file).parent
        folder.mkdir(parents=True, exist_ok=True)
        if file.parts[0] == "src":
            (folder / "__init__.py").touch()
        (root / file).write_text(text)
        print(file)
