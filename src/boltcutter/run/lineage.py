"""Lineage of a run: the code with its uncommitted changes, the packages and the hardware."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import Any

from boltcutter import files
from boltcutter.config.errors import printable
from boltcutter.config.redaction import SECRET_TEXT, holds_value, is_secret_file, without_credentials
from boltcutter.project import LIBRARY, SOURCE

GIT_OPTIONS = (
    *("-c", "core.quotePath=false", "-c", "core.fsmonitor=false", "-c", "index.sparse=false"),
    *("-c", "color.ui=false", "-c", "advice.addEmbeddedRepo=false", "-c", "safe.bareRepository=explicit"),
    *("-c", "core.hooksPath=/dev/null", "-c", "submodule.recurse=false", "-c", "diff.submodule=short"),
)
# No remote is contacted for objects that a partial clone lacks, also by git before 2.44.
GIT_OFFLINE = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none", "GIT_TERMINAL_PROMPT": "0"}
# A patch for git apply, independent of configured external programs, colors and prefixes.
DIFF_COMMAND = (
    *("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--src-prefix=a/", "--dst-prefix=b/"),
    *("--full-index", "--unified=3", "--inter-hunk-context=0", "--ignore-submodules=dirty"),
)
GIT_VARIABLES = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_EXTERNAL_DIFF", "GIT_DIFF_OPTS"}
MAX_UNTRACKED_BYTES = 1_000_000  # larger new files are not part of code.patch
MAX_UNTRACKED_TOTAL = 20_000_000  # bytes of all new files
MAX_UNTRACKED_FILES = 1000  # new files, of a folder and in all
MARKERS = ("*/pyvenv.cfg", "*/conda-meta", "node_modules")  # of an environment in a folder, or in one below it
LIBRARY_FOLDER = SOURCE / LIBRARY
SNAPSHOT = ".snapshot.json"  # in a copy of the code: the state of the repository that it was copied from


def differences(record: dict[str, Any], root: Path, ranks: int) -> list[str]:
    """List how code, packages, hardware and ranks of a run differ from the current ones, one line each."""
    found = code_differences(record, git_state(root), library_state(root))
    here, then = {**hardware(), "number of ranks": ranks}, dict(record.get("hardware", {}))
    devices = [attempt["devices"] for attempt in record.get("attempts") or () if "devices" in attempt]
    then |= {"number of ranks": devices[-1]} if devices else {}  # of the last attempt
    return found + [
        printable(f"{key} is {here.get(key)}, was {was}") for key, was in then.items() if here.get(key) != was
    ]


def code_differences(record: dict[str, Any], source: dict[str, Any], library: dict[str, Any]) -> list[str]:
    """List how code and packages of a run differ from the current ones, one line each.

    Args:
        record: Of the run.
        source: Of the project, from ``git_state``.
        library: From ``library_state``.
    """
    then, found = record.get("git") or {}, []
    if (was := then.get("commit")) != (commit := source.get("commit")):
        found.append(f"git commit is {commit}, was {was}; git checkout {was}")
    if then.get("changes") != source["changes"]:
        found.append("uncommitted changes differ; see code.patch of the run")
    was_library = record.get("library") or {}
    if was_library and library.get("commit") != was_library.get("commit"):
        found.append(f"the library's commit is {library.get('commit')}, was {was_library.get('commit')}")
    if was_library and library.get("changes") != was_library.get("changes"):
        found.append("uncommitted changes of the library differ; see library.patch of the run")
    installed = packages()
    for name, was in record.get("packages", {}).items():
        if installed.get(name) != was:
            found.append(f"package {name} is {installed.get(name, 'absent')}, was {was}")
    if platform.python_version() != record.get("python"):
        found.append(f"Python is {platform.python_version()}, was {record.get('python')}")
    return [printable(line) for line in found]


def code_key(source: dict[str, Any], library: dict[str, Any]) -> dict[str, Any]:
    """What identifies the code of a project and of the library: commits, and hashes of uncommitted changes."""
    states = {"": source, "library_": library}
    return {f"{of}{key}": state.get(key) for of, state in states.items() for key in ("commit", "changes")}


def git_state(where: Path) -> dict[str, Any]:
    """Return commit, branch, remote and uncommitted changes of the code; None for each outside of a git repository.

    The patch has the changes of all tracked files of the repository, as a project may import other packages of a
    monorepo, but new files only of ``where``. ``patch`` and ``dirty`` are None if git failed to list the changes;
    ``left_out`` lists changed files that look like secrets and are excluded from the patch; ``large`` what else of new
    files is: environments, large files and folders of many files.

    Args:
        where: Root of the project, or a folder of the library.
    """
    above = (folder / SNAPSHOT for folder in (where, *where.parents))
    if snapshot := next(
        (file for file in above if file.is_file() and file.lstat().st_uid in _known_owners(where)), None
    ):
        return dict(json.loads(snapshot.read_text()) | {"patch": b""})
    top = _git(where, "rev-parse", "--show-toplevel")
    if not top:
        if note := _stranger(where):
            print(f"note: {note}: commit and changes are not recorded", file=sys.stderr)
        return {"commit": None, "branch": None, "remote": None, "dirty": None, "changes": None, "patch": b""}
    root = Path(os.fsdecode(top.removesuffix(b"\n")))
    commit, remote = _text(root, "rev-parse", "--verify", "HEAD"), _text(root, "config", "--get", "remote.origin.url")
    # In place of a first commit the empty tree, whose hash depends on the repository's hash function.
    base = commit or _text(root, "hash-object", "-t", "tree", "--stdin") or ""
    patch, left_out, large = _patch(root, base, os.path.relpath(where.resolve(), root))
    return {
        "commit": commit,
        "branch": _text(root, "rev-parse", "--abbrev-ref", "HEAD"),
        "remote": without_credentials(remote) if remote else None,
        "dirty": None if patch is None else bool(patch or left_out),
        "changes": hashlib.sha256(patch).hexdigest()[:16] if patch else None,
        "left_out": left_out,
        "large": large,
        "patch": patch,
    }


def library_state(root: Path) -> dict[str, Any]:
    """Version of this library, and its commit; of an editable checkout also the uncommitted changes.

    Args:
        root: Folder of the project; a library in it is part of the project's state.
    """
    folder, state = LIBRARY_FOLDER, dict[str, Any]()
    if (folder / SNAPSHOT).is_file():
        return git_state(folder)
    with suppress(PackageNotFoundError):
        found = distribution(__name__.partition(".")[0])
        state["version"] = found.version
        source = json.loads(found.read_text("direct_url.json") or "{}")  # PEP 610
        state["commit"] = source.get("vcs_info", {}).get("commit_id")
    if is_editable():
        state |= {"path": str(folder), "commit": None, "patch": b""}
        own, project = (_git(where, "rev-parse", "--show-toplevel") for where in (folder, root))
        if own != project or not folder.is_relative_to(root.resolve()):
            checkout = folder.parents[1]
            state |= git_state(checkout if (checkout / "pyproject.toml").is_file() else folder)
    return state


def is_editable() -> bool:
    """Whether this library is a checkout that can be edited, rather than an installed release."""
    return not {"site-packages", "dist-packages"} & set(LIBRARY_FOLDER.parts)


def packages() -> dict[str, str]:
    """Return the version of every installed distribution, from folder names, since reading their metadata is slow."""
    folders = [path.stem for entry in sys.path for path in Path(entry or ".").glob("*.dist-info")]
    found = {name: version for name, _, version in (folder.rpartition("-") for folder in reversed(folders))}
    return {name.replace("_", "-"): found[name] for name in sorted(found, key=str.lower)}


def hardware() -> dict[str, Any]:
    """Return CPU, memory and accelerators, and torch's number of threads."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }


def is_deterministic(device: str) -> bool:
    """Whether training on a type of device repeats bitwise: always on the CPU, else with deterministic algorithms."""
    import torch

    is_strict = torch.get_deterministic_debug_mode() == 2  # neither off nor only warnings
    return device == "cpu" or (is_strict and not torch.backends.cudnn.benchmark)


def _cpu_name() -> str:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        if names := [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]:
            return names[0]
    return platform.processor()


def _patch(root: Path, commit: str, folder: str) -> tuple[bytes | None, list[str], list[str]]:
    """Changes since a commit and new files of a folder, in the form of ``git apply``.

    Also the secret files left out, and descriptions of the large ones. The patch is None where git fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        index = Path(scratch) / "index"  # a copy, so that the user's own stays as it is
        own, objects = (root / (_text(root, "rev-parse", "--git-path", name) or "") for name in ("index", "objects"))
        if own.is_file():
            shutil.copy2(own, index)  # with its time, by which git knows which files may have changed since
        env = {"GIT_INDEX_FILE": str(index), "GIT_OBJECT_DIRECTORY": scratch}  # the repository may be read-only
        env["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = json.dumps(str(objects), ensure_ascii=False)
        environments = _environments(root, root / folder)
        excluded = [f"--exclude=/{_escaped(name)}/" for name in environments]  # git does not even enter them
        excluded.append("--exclude=__pycache__/")  # what Python writes, in a project without .gitignore
        new = list_files(root, "--others", "--exclude-standard", *excluded, "--full-name", "--", folder)
        changed = _names(_git(root, *DIFF_COMMAND, "--name-only", "-z", commit, env=env))
        if new is None or changed is None:
            return None, [], []
        new, large = _small(root, folder, new)
        large = [f"{name}/ (an environment)" for name in environments] + large
        secret = sorted(name for name in {*new, *changed} if holds_secret(root / name))
        add = "".join(f"{name}\0" for name in new if name not in secret)
        command = ("--literal-pathspecs", "add", "--intent-to-add", "--pathspec-from-file=-", "--pathspec-file-nul")
        # Otherwise git adds nothing if one of them is outside of a sparse checkout.
        if add and _git(root, "-c", "core.sparseCheckout=false", *command, env=env, given=add) is None:
            return None, secret, large
        without = [f":(top,exclude,literal){name}" for name in secret]
        return _git(root, *DIFF_COMMAND, "--binary", commit, "--", ":(top)", *without, env=env), secret, large


def _environments(root: Path, folder: Path) -> list[str]:
    """Environments of Python, conda or npm in a folder that git neither tracks nor ignores, relative to ``root``."""
    found = [
        place if place.name == "node_modules" else place.parent
        for marker in MARKERS
        for form in (marker, f"*/{marker}")
        for place in folder.glob(form)
    ]
    names = [os.path.relpath(place, root) for place in found if place.resolve() != folder.resolve()]
    listed = names and list_files(root, "--others", "--exclude-standard", "--directory", "--full-name", "--", *names)
    return sorted({name.rstrip("/") for name in listed or ()} & set(names))


def _escaped(name: str) -> str:
    """A path as a pattern of .gitignore that matches only this path."""
    return re.sub(r"([\\*?\[\]!# ])", r"\\\1", name)


def _small(root: Path, folder: str, names: list[str]) -> tuple[list[str], list[str]]:
    """Of new files those that belong into a patch; and in words, with their number, what is left out.

    A folder of many files, such as of a dataset, is left out before any of its files is looked at.
    """
    large = list[str]()
    top = "" if folder == "." else f"{folder}/"
    while len(names) > MAX_UNTRACKED_FILES:
        inside = [PurePosixPath(name.removeprefix(top)) for name in names]
        counts = Counter(f"{parent}/" for path in inside for parent in path.parents[:-1])
        counts["*"] = sum(len(path.parts) == 1 for path in inside)
        # The innermost of many files, besides which code may be; if none has many, the largest.
        many = [place for place, count in counts.items() if count > MAX_UNTRACKED_FILES] or [
            max(counts, key=lambda one: counts[one])
        ]
        place = max(many, key=lambda one: (one.count("/"), counts[one]))
        large.append(f"{top}{place} ({counts[place]:,} files)")
        is_left_out = [len(p.parts) == 1 if place == "*" else str(p).startswith(place) for p in inside]
        names = [name for name, leaves in zip(names, is_left_out, strict=True) if not leaves]
    sizes = {name: (root / name).stat().st_size for name in names if (root / name).is_file()}
    kept, total = list[str](), 0
    for name in sorted(sizes, key=lambda name: sizes[name]):
        total += sizes[name]
        if sizes[name] <= MAX_UNTRACKED_BYTES and total <= MAX_UNTRACKED_TOTAL:
            kept.append(name)
        else:
            large.append(f"{name} ({sizes[name] / 1e6:,.1f} MB)")
    return sorted(kept), large


def holds_secret(file: Path) -> bool:
    """Return whether a file probably holds keys, certificates or passwords, by its name or contents."""
    if is_secret_file(file.name) or is_secret_file(file.resolve().name):
        return True
    if not file.is_file() or file.stat().st_size > MAX_UNTRACKED_BYTES:
        return False
    # A file that this user cannot read may be secret as well, and would make git fail.
    if not os.access(file, os.R_OK):
        return True
    text = file.read_text(errors="replace")
    return bool(SECRET_TEXT.search(text)) or holds_value(text)


def changed_files(root: Path, first: str | None, second: str | None) -> list[str] | None:
    """Files that differ between two commits; None if the repository does not have both."""
    known = [str(commit) for commit in (first, second) if re.fullmatch("[0-9a-f]{40,64}", str(commit))]
    return _names(_git(root, *DIFF_COMMAND, "--name-only", "-z", *known, "--")) if len(known) == 2 else None


def list_files(root: Path, *options: str) -> list[str] | None:
    """List files of a repository; None if there is none, or git fails."""
    return _names(_git(root, "--literal-pathspecs", "ls-files", "-z", *options))


def _names(listed: bytes | None) -> list[str] | None:
    return None if listed is None else [os.fsdecode(name) for name in listed.split(b"\0") if name]


def _text(where: Path, *words: str) -> str | None:
    """Return the output of git without whitespace at the ends; None if it is empty or git fails."""
    return os.fsdecode(_git(where, *words) or b"").strip() or None


def _git(where: Path, *words: str, env: dict[str, str] | None = None, given: str = "") -> bytes | None:
    """Return the output of git, independent of the user's configuration and environment; None if it fails.

    Git runs programs that the settings of a repository name, so that the repository must be of the owner of ``where``.
    """
    top = _find_top(where)
    if top is None or _stranger(where):
        return None
    inherited = {name: value for name, value in os.environ.items() if name not in GIT_VARIABLES}
    safe: tuple[str, ...] = ("-c", f"safe.directory={top}")
    try:
        if not files.is_ours((top / ".git").stat()):
            safe += _without_filters(top, safe)
        done = subprocess.run(
            ["git", *GIT_OPTIONS, *safe, "-C", str(where), *words],
            input=os.fsencode(given),
            capture_output=True,
            env=inherited | GIT_OFFLINE | (env or {}),
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _find_top(where: Path) -> Path | None:
    """The top of the repository that git would find; None if there is none."""
    place = where.resolve()
    return next((folder for folder in (place, *place.parents) if os.path.lexists(folder / ".git")), None)


def _known_owners(where: Path) -> set[int]:
    return {*files.trusted_owners(), where.stat().st_uid}


def _stranger(where: Path) -> str | None:
    """Whose repository ``where`` is in, if it is neither that of the user nor of the owner of ``where``."""
    if (top := _find_top(where)) is None:
        return None
    known = _known_owners(where)
    places = [top, top / ".git"]
    with suppress(OSError, ValueError), files.open_file(places[1], follows=True) as file:  # of a worktree or submodule
        places.append(top / file.read().decode(errors="replace").removeprefix("gitdir:").strip())
    try:
        other = next((place for place in places if not {place.lstat().st_uid, place.stat().st_uid} <= known), None)
    except OSError:
        return f"{top}/.git leads nowhere"
    return f"{other} belongs to another user ({files.owner_name(other)})" if other else None


def _without_filters(top: Path, safe: tuple[str, ...]) -> tuple[str, ...]:
    """Options that leave out the filters which the settings of a repository of another user define."""
    listed = _git_config(top, safe)
    names = sorted({name.rpartition(".")[0] for name in listed if name.lower().startswith("filter.")})
    if any("=" in name for name in names):
        raise OSError(f"{top}: a filter of its settings cannot be left out")
    ends = ("clean=", "smudge=", "process=", "required=false")
    return tuple(word for name in names for end in ends for word in ("-c", f"{name}.{end}"))


def _git_config(top: Path, safe: tuple[str, ...]) -> list[str]:
    """The names of all settings that apply in a repository."""
    command = ["git", *GIT_OPTIONS, *safe, "-C", str(top), "config", "--list", "--name-only", "-z"]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    if done.returncode:
        raise OSError(f"{top}: its settings cannot be read")
    return _names(done.stdout) or []
