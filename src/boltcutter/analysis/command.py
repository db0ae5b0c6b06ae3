"""The command ``boltcutter runs``: list, label, remove and archive runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from boltcutter.analysis import actions, luck, query, table
from boltcutter.analysis.query import OPERATORS, select
from boltcutter.analysis.record import Run, find_runs
from boltcutter.analysis.references import candidates, find, runs_folder
from boltcutter.checkpoint.storage import is_url
from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError, hint, printable
from boltcutter.config.values import split_overrides
from boltcutter.formatting import aligned, parse_count
from boltcutter.project import Project, command, display_path

VERBS = ("tag", "untag", "note", "remove", "archive", "restore")
VALUES = ("--sort", "--columns", "--limit")  # flags that are followed by a value
SWITCHES = ("--html", "--live", "--csv", "--archived", "--yes")
LIMIT = 50  # rows of a table
PAGE = "runs.html"  # unless --html=<file>


def runs_command(project: Project, arguments: list[str]) -> list[Run] | None:
    """List runs, which are returned, or change their labels or places."""
    if "--complete" in arguments:
        complete(project, arguments[arguments.index("--complete") + 1 :])
        return None
    flags, rest = parse(arguments, VALUES, SWITCHES)
    place = runs_folder(project, rest)
    rest = [argument for argument in rest if not argument.startswith("runs=")]
    if "--live" in flags:
        serve(project, place, flags, rest)
        return None
    if is_url(place) and ((rest[:1] and rest[0] in VERBS) or "--archived" in flags):
        raise ConfigError(f"runs={place}: runs at a URL are only listed; labels and archives need a folder")
    if rest and rest[0] in VERBS:
        with actions.writing(rest[0], "check its permissions and the free space"):
            act(Path(place), rest[0], rest[1:], flags, [word for word in arguments if word.startswith("runs=")])
        return None
    if len(rest) > 1:
        if near := hint(rest[0], VERBS):
            raise ConfigError(
                f"{rest[0]}: no such command{near} (there are: {', '.join(VERBS)})", kind="unknown_command"
            )
        raise ConfigError(f"{rest[1]}: one filter is expected; quote it: {command('runs', ' '.join(rest))}")
    root = Path(place, actions.ARCHIVE) if "--archived" in flags else place
    known, text = find_runs(root), rest[0] if rest else ""
    runs = chosen(known, text) if text else known
    if "--sort" in flags:
        runs = table.sort(runs, flags["--sort"])
    show(runs, known, place, flags, text)
    return runs


def parse(given: Sequence[str], values: Sequence[str], others: Sequence[str] = ()) -> tuple[dict[str, str], list[str]]:
    """Flags, those of ``values`` with what follows them, and the other arguments."""
    flags, rest, words, known = dict[str, str](), list[str](), iter(given), (*values, *others)
    for argument in words:
        name, equals, value = argument.partition("=")
        if not argument.startswith("--"):
            rest.append(argument)
            continue
        all_flags = (*known, "--json", "--help")  # of which two are handled before
        nearest = next(iter(get_close_matches(name, all_flags, 1)), "")  # itself, if there is such a flag
        if nearest in values and not equals:
            value = next(words, "")
        if name not in known or (equals and name not in (*values, "--html")):
            shown = f"={value}" if value and nearest in (*values, "--html") else ""
            near = nearest and f"; did you mean {nearest}{shown}?"
            wrong = f"{name}{shown}" if shown else argument
            raise ConfigError(f"{wrong}: no such flag{near} (there are: {', '.join(all_flags)})", kind="unknown_flag")
        if name in values and not value:
            raise ConfigError(f"{name}: needs a value; write {name}=<{name.strip('-')}>")
        flags[name] = value
    return flags, rest


def show(runs: Sequence[Run], known: Sequence[Run], place: str, flags: dict[str, str], text: str) -> None:
    """Print runs, some of all known ones, as a table or as CSV, or write a page about them."""
    if "--html" in flags:
        from boltcutter.analysis.page import write_table  # slow imports

        path = Path(flags["--html"] or PAGE)
        with actions.writing(f"--html={path}", "choose another file"):
            print(display_path(write_table(runs, path, place)))
        return
    if "--csv" in flags:
        print(printable(table.as_csv(runs, table.columns(runs, flags.get("--columns"))[0])), end="")
        return
    if not runs:
        print(printable(f"no runs in {place}" + (f" match {text}" if text else "")))
        return
    if (count := parse_count(limit := flags.get("--limit", str(LIMIT)))) is None:
        raise ConfigError(f"--limit={limit}: not a number of rows; use 0 for all runs")
    count = count or len(runs)
    shown = runs[:count] if "--sort" in flags else runs[-count:]  # the newest are the last
    keys, others = table.columns(runs if "--columns" in flags else shown, flags.get("--columns"))
    others = [*table.print_table(shown, keys), *others]
    if len(shown) < len(runs):
        print(f"{len(shown)} of {len(runs)} runs; --limit 0 shows all")
    if others:
        print(printable(f"not shown: {', '.join(others)}; choose columns by --columns"))
    if read := next(
        filter(None, (luck.describe(known, key, [r for r in runs if key in r.metrics]) for key in keys)), ""
    ):
        print(printable(f"note: {read}"), file=sys.stderr)
    for run in (run for run in shown if run.status == "unreadable"):
        print(printable(f"warning: {run.folder}: {run.reason}"), file=sys.stderr)


def serve(project: Project, place: str, flags: dict[str, str], rest: Sequence[str]) -> None:
    """Serve the page of the runs; ``host=``, ``port=`` and ``token_file=`` are among the other arguments."""
    from boltcutter.analysis import live  # slow imports

    settings, words = split_overrides(rest, *live.SETTINGS)
    if other := [flag for flag in flags if flag != "--live"]:
        raise ConfigError(f"{other[0]}: has no effect with --live; remove it")
    if is_url(place):
        raise ConfigError(f"runs={place}: only a folder can be followed; use --html, or boltcutter sync")
    if len(words) > 1 or (words and words[0] in VERBS):
        raise ConfigError(f"--live {' '.join(words)}: one filter is expected; quote it")
    chosen, known = query.parse(text := words[0] if words else ""), find_runs(place)
    for key, _ in chosen.keys:  # which runs that are still to come may have
        near = hint(key, live.SETTINGS) if text.startswith(f"{key}=") and " " not in text else ""
        if (fault := query.find_fault(known, key)) or not known:
            if near and key.isidentifier() and key not in compose(project):
                raise ConfigError(f"{key}: no such argument{near}", kind="unknown_key")
            print(printable(f"warning: {key}: {fault}\n" if fault else ""), end="", file=sys.stderr)
    live.serve(place, chosen, settings)


def act(root: Path, verb: str, words: Sequence[str], flags: dict[str, str], given: Sequence[str]) -> None:
    """Change the labels of runs, or remove, archive or restore them; ``given`` is ``runs=…`` of the command."""
    texts = {"tag": "<tag> …", "untag": "<tag> …", "note": "<text>"}
    least = 2 if verb in texts else 1
    if len(words) < least or (verb == "note" and len(words) > least):
        usage = f"boltcutter runs {verb} <run or filter> {texts.get(verb, '…')}".rstrip()
        raise ConfigError(f"{verb}: {'text' if verb in texts else 'run'} missing, or too many arguments; use {usage}")
    if not (known := find_runs(root / actions.ARCHIVE if verb == "restore" else root)):
        raise ConfigError(f"{verb}: there are no {'archived ' * (verb == 'restore')}runs; boltcutter runs lists all")
    picked = {run.folder: run for word in words[: 1 if verb in texts else None] for run in chosen(known, word)}
    searches = () if verb in texts else {run.id for run in picked.values()}  # whose folders hold those of their trials
    runs = [run for run in picked.values() if run.parent not in searches]
    if not runs:
        print("no runs are selected")
    elif verb in texts:
        if verb == "note":
            actions.note(runs, words[1])
        else:
            actions.tag(runs, words[1:], removes=verb == "untag")
        print(printable("\n".join(aligned([[run.id, verb, " ".join(words[1:])] for run in runs]))))
    elif verb == "remove":
        for run in actions.remove(runs, is_confirmed="--yes" in flags):
            print(printable(f"removed {display_path(Path(run.folder))}"))
    else:
        for run, place in zip(runs, actions.archive(root, runs, restores=verb == "restore"), strict=True):
            undo = command("runs", "archive" if verb == "restore" else "restore", run.id, *given)
            print(printable(f"{display_path(place)}; undo by: {undo}"))


def chosen(runs: Sequence[Run], word: str) -> list[Run]:
    """The runs of a filter, or the run of a name."""
    is_filter = any(operator in word for operator in OPERATORS) and not Path(word).exists()
    return select(runs, word) if is_filter else [find(runs, word)]


def complete(project: Project, arguments: Sequence[str]) -> None:
    """Print candidates for the shell: flags, verbs, names of runs and keys of filters."""
    current, *given = arguments or [""]
    found: dict[str, str] = dict.fromkeys((*VALUES, *SWITCHES, "--json") if current.startswith("-") else (), "")
    if not current.startswith("-"):
        found = candidates(project)
        if not given:
            keys = table.columns(find_runs(runs_folder(project)))[0]
            found = {**dict.fromkeys(VERBS, ""), **found, **dict.fromkeys([f"{key}=" for key in keys], "")}
    print("".join(f"{name}\t{text}\n" for name, text in found.items() if name.startswith(current)), end="")
