"""Import a project of lightning-hydra-template or of Lightning CLI, and compare the first steps of both."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import zip_longest
from math import isclose
from pathlib import Path

from boltcutter import files
from boltcutter.config.errors import ConfigError, one_line
from boltcutter.project import TABLE, Project, display_path
from boltcutter.scaffold import port_cli, port_lht, port_script, source_code
from boltcutter.scaffold.add import split_flag
from boltcutter.scaffold.yaml_text import Rows

IGNORED = (".git", ".venv", "__pycache__", "*.ckpt", "logs", "lightning_logs", "mlruns", "outputs", "multirun", "wandb")
STEPS, SEED = 20, 1
MAX_COPIED = 1 << 24  # bytes of a folder without code
RESOLVERS = "omegaconf_resolvers"  # the module that registers those of the project
Losses = list[float | None]
Pair = tuple[str, list[str], list[str]]
KINDS = {"lht": "lightning-hydra-template", "cli": "Lightning CLI"}


def import_command(project: Project, arguments: list[str]) -> None:
    """Write a project beside a folder, print what became of each file, and compare the first steps of both.

    Args:
        project: Project of the working directory, which has no effect.
        arguments: The folder; ``--from lht`` or ``--from cli`` where that cannot be told from its files; ``--config``
            with each configuration file of Lightning CLI that one training reads; and overrides, in the project's own
            words, for the trainings that are compared.

    Raises:
        ConfigError: An argument is wrong, or the folder holds no such project.
        SystemExit: The first steps differ, or the imported project does not train.
    """
    layers, arguments = _config_files(arguments)
    kind, arguments = split_flag(arguments, "--from")
    overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("--")]
    folders = [argument for argument in arguments if argument not in overrides]
    if len(folders) != 1:
        raise ConfigError(
            "folder: missing, or more than one; write `boltcutter import my-project --from lht`", kind="missing_value"
        )
    if kind not in (None, *KINDS):
        raise ConfigError(f"--from={kind}: neither {' nor '.join(KINDS)}; leave it out")
    source = Path(folders[0]).absolute()
    if not source.is_dir():
        raise ConfigError(f"import {folders[0]}: no such folder; give the folder of a project")
    if source.stat().st_uid not in files.trusted_owners():
        raise ConfigError(
            f"import {folders[0]}: belongs to another user ({files.owner_name(source)}), and its code would be "
            "executed to compare the first steps; if you trust it, copy it and import the copy"
        )
    layout = port_lht.find_layout(source) if kind != "cli" and not layers else None
    is_unknown = kind is None and not (layout or layers or port_cli.entry_script(source))
    if is_unknown and (missing := port_lht.missing_main(source)):
        raise ConfigError(missing)
    kind = kind or ("lht" if layout else "cli")
    if not (
        layout if kind == "lht" else layers or port_cli.config_files(source)
    ):  # before it is copied, as it may be large
        raise ConfigError(f"import {folders[0]}: no configuration of {KINDS[kind]} there; give the folder of one")
    target = source.with_name(f"{source.name}-boltcutter")
    if target.exists():
        raise ConfigError(f"import {folders[0]}: {target} exists already; move it away")
    with tempfile.TemporaryDirectory(dir=source.parent) as draft:  # nothing is left behind by an error
        written = Path(draft) / target.name
        linked = _data_folders(source)
        skipped = (*IGNORED, *linked, *(["configs"] if kind == "lht" else []))
        try:
            shutil.copytree(source, written, ignore=lambda place, names: _ignored(source, Path(place), names, skipped))
            for name in linked:
                (written / name).symlink_to(source / name)
            converter = port_script if layout and layout.fit else port_lht
            rows = converter.convert(layout, written / "configs") if layout else Rows()
            experiments = [] if layout else port_cli.convert(source, written / "configs", rows, layers)
            rows += _write_resolvers(source, written)
            _write_settings(written)
        except ConfigError:
            raise
        except Exception as error:  # files may be of any other form
            reason = f"{type(error).__name__}: {one_line(error, 200)}"
            raise ConfigError(f"import {source}: not a project of {KINDS[kind]} ({reason}); correct it") from error
        table = _table(rows)
        (written / "IMPORTED.md").write_text(f"# What became of each file\n\n{table}\n\nAll other files are copies.\n")
        written.rename(target)
    print(f"Wrote {display_path(target)} from {KINDS[kind]}; Python files are copies.\n\n{table}\n")
    print("Train there by `boltcutter train`, which takes the place of the project's own script.\n")
    pairs = _hydra_pair(source, layout, overrides) if layout else _cli_pairs(source, experiments, overrides)
    outcomes = [compare(source, target, *pair) for pair in pairs]
    if not all(outcomes):
        sys.exit(1)


def _config_files(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """The files given by ``--config``, which may be repeated, and the other arguments."""
    files, rest = list[Path](), list[str]()
    pending = iter(arguments)
    for argument in pending:
        if argument in ("--config", "-c"):
            files.append(Path(next(pending, "")).absolute())
        elif argument.startswith("--config="):
            files.append(Path(argument.partition("=")[2]).absolute())
        else:
            rest.append(argument)
    if missing := next((file for file in files if not file.is_file()), None):
        raise ConfigError(f"--config={display_path(missing)}: no such file; give a configuration file of Lightning CLI")
    return files, rest


def _data_folders(source: Path) -> list[str]:
    """The folders that are linked, as they may be large: ``data`` and those of more than 16 MiB, without any code."""
    folders = [place for place in source.iterdir() if place.is_dir() and place.name not in IGNORED]
    return [place.name for place in folders if _is_data(place, 0 if place.name == "data" else MAX_COPIED)]


def _is_data(folder: Path, min_size: int) -> bool:
    """Whether a folder has no Python or YAML file, and at least ``min_size`` bytes."""
    size = 0
    for place, _, names in os.walk(folder):
        if any(name.endswith((".py", ".yaml", ".yml")) for name in names):
            return False
        size += sum(os.lstat(os.path.join(place, name)).st_size for name in names) if size < min_size else 0
    return size >= min_size


def _ignored(source: Path, folder: Path, names: list[str], skipped: tuple[str, ...]) -> set[str]:
    ignored = set(shutil.ignore_patterns(*(skipped if folder == source else IGNORED[:4]))(str(folder), names))
    for name in names:  # FIFOs, devices, and links that lead nowhere or to a folder that they are in
        path = folder / name
        is_plain = path.is_file() or (path.is_dir() and not folder.resolve().is_relative_to(path.resolve()))
        ignored |= set() if is_plain else {name}
    return ignored


def _write_resolvers(source: Path, target: Path) -> Rows:
    """Write a module that registers the resolvers which the project's own files register."""
    text, found = source_code.resolvers(source)
    if not found:
        return []
    (target / f"{RESOLVERS}.py").write_text(
        f'"""Resolvers of OmegaConf, which are registered before a configuration is read."""\n\n{text}\n'
    )
    return [(place, f"{RESOLVERS}.py", note) for place, note in found]


def _write_settings(target: Path) -> None:
    """Mark the folder as a project, whose package is in ``src`` or is ``src`` itself."""
    inner = [file.parent.name for file in sorted((target / "src").glob("*/__init__.py"))]
    package = "src" if (target / "src" / "__init__.py").is_file() else inner[0] if inner else ""
    file = target / "pyproject.toml"
    before = file.read_text().rstrip("\n") + "\n\n" if file.is_file() else ""
    resolvers = f'resolvers = "{RESOLVERS}"\n' if (target / f"{RESOLVERS}.py").is_file() else ""
    file.write_text(f"{before}{TABLE}\n" + (f'package = "{package}"\n' if package else "") + resolvers)


def _table(rows: Rows) -> str:
    return "\n".join(["| file | became | note |", "|---|---|---|", *(f"| {a} | {b} | {c} |" for a, b, c in rows)])


def _hydra_pair(source: Path, layout: port_lht.Layout, overrides: list[str]) -> list[Pair]:
    """The name of the configuration, and the arguments of the original script and of training here."""
    given = {override.lstrip("+~").partition("=")[0] for override in overrides}
    if added := [f"{group}={option}" for group, option in port_lht.left_open(layout).items() if group not in given]:
        print(f"Compared with {' '.join(added)}, as {layout.main.name} leaves that open.\n")
    overrides = [*overrides, *added]
    groups = {path.name for path in layout.configs.iterdir()}
    theirs = [f"++seed={SEED}", *overrides, "hydra.run.dir={}"]
    if "extras" in groups:
        theirs += ["++extras.enforce_tags=False", "++extras.print_config=False"]
    if not _has_gpu():
        theirs += ["++trainer.accelerator=cpu", "++trainer.devices=1"]
    script = [str(layout.script), *theirs] if layout.script else []
    keys = port_script.constants(layout) if layout.fit else port_lht.constants(layout)
    names = ({} if layout.fit else layout.groups) | {key: f"constants.{key}" for key in keys}
    return [(layout.main.name, script, [_renamed(override, names) for override in overrides])]


def _renamed(override: str, names: dict[str, str]) -> str:
    sign, key, rest = re.fullmatch(r"([+~]*)([^=]*)(.*)", override, re.S).groups()  # type: ignore[union-attr]
    first, dot, inner = key.partition(".")
    return f"{sign}{names.get(first, first)}{dot}{inner}{rest}"


def _cli_pairs(source: Path, experiments: list[port_cli.Experiment], overrides: list[str]) -> list[Pair]:
    """As ``_hydra_pair``, for each experiment that was written from files of Lightning CLI."""
    entry = port_cli.entry_script(source)
    pairs = list[Pair]()
    for made in experiments:
        files = [argument for file in made.files for argument in ("--config", str(file))]
        given = [f"--{override}" for override in overrides]
        given += [] if _has_gpu() else ["--trainer.accelerator=cpu", "--trainer.devices=1"]
        script = [str(entry), *made.subcommand, *files, f"--seed_everything={SEED}", *given]
        ours = [port_cli.renamed(override, made) for override in overrides]
        pairs.append((made.label, script if entry else [], [f"experiment={made.name}", *ours]))
    return pairs


def _has_gpu() -> bool:
    import torch  # slow import

    return bool(torch.cuda.is_available())


def compare(source: Path, target: Path, name: str, theirs: list[str], ours: list[str]) -> bool:
    """Train the original and the import for a few steps, and print whether their losses are the same.

    Returns:
        Whether the import trains, and does as the original where that can run here.
    """
    with tempfile.TemporaryDirectory() as scratch:
        given = {override.lstrip("+~").partition("=")[0] for override in ours}
        quick = [f"folder={scratch}/run", f"seed={SEED}", "report=false", "test=false"]
        quick += [] if "logger" in given else ["logger=csv"]
        on_cpu = {"trainer.accelerator": "cpu", "trainer.devices": "1"}
        quick += [] if _has_gpu() else [f"{key}={text}" for key, text in on_cpu.items() if key not in given]
        imported = _steps(target, Path(scratch, "ours.json"), ["boltcutter", "train", *ours, *quick])
        if isinstance(imported, str):
            print(f"{name}: the import does not train: {imported}", file=sys.stderr)
            return False
        if not theirs:
            print(f"{name}: the import trains; not compared, as no script of the original was found")
            return True
        original = _steps(source, Path(scratch, "theirs.json"), [a.replace("{}", scratch) for a in theirs])
    if isinstance(original, str):
        print(f"{name}: the import trains; not compared, as the original does not run here: {original}")
        return True
    if difference := first_difference(original, imported):
        print(f"{name}: {difference}", file=sys.stderr)
        return False
    print(f"{name}: the same losses in {len(original)} steps from the same seed")
    return True


def first_difference(original: Losses, imported: Losses) -> str | None:
    """The first loss that differs, with both values; None if none does."""
    for step, (one, other) in enumerate(zip_longest(original, imported), 1):
        if one is None or other is None or not isclose(one, other, rel_tol=1e-6):
            return f"the loss of step {step} differs: {one} in the original, {other} in the import"
    return None


def _steps(folder: Path, file: Path, arguments: list[str]) -> Losses | str:
    """The losses of the first steps of a training, or the last line of its error."""
    path = os.pathsep.join([str(folder), str(folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "boltcutter.scaffold.proof", str(file), str(STEPS), str(SEED), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=False,
    )
    if file.is_file():
        return list(json.loads(file.read_text()))
    ended = f"it ended with exit status {done.returncode} before any step"
    lines = [line for line in done.stderr.splitlines() if line.strip() and "HYDRA_FULL_ERROR" not in line] or [ended]
    message = next((line for line in reversed(lines) if line.startswith("error: ") or "Error: " in line), lines[-1])
    return message if message.startswith("error: ") else f"{_last_place(lines, folder)}{message}"


def _last_place(lines: list[str], folder: Path) -> str:
    """File and line of the last frame of a traceback that is in the project itself."""
    frames = [found for line in lines if (found := re.match(r'\s*File "(.+?)", line ([0-9]+)', line))]
    own = [(Path(frame[1]), frame[2]) for frame in frames if Path(frame[1]).is_relative_to(folder)]
    return f"{own[-1][0].relative_to(folder)}:{own[-1][1]}: " if own else ""
