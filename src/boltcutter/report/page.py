"""HTML report of a run: one self-contained file, rendered only from the files of the run folder."""

from __future__ import annotations

import base64
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from boltcutter import extend, files, run_files
from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.errors import one_line, printable
from boltcutter.project import LIBRARY, command
from boltcutter.report import exports, media, pixels
from boltcutter.report.outcome_report import read_outcomes
from boltcutter.report.reader import ReportReader
from boltcutter.report.template import load_template, redact_command, shorten
from boltcutter.run import evaluations, trust
from boltcutter.run.metrics import MetricsReader, Mode, infer_mode, parse_name
from boltcutter.run.remote.store import run_store

MAX_POINTS = 1000  # per curve
OPENING = (
    *(yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken),
    *(yaml.BlockSequenceStartToken, yaml.BlockMappingStartToken),
)
CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
MAX_CONFIG = 1 << 20  # bytes of config.yaml, whose parser takes 7 s and 200 MB for them
# Leaves values texts, as other loaders take minutes for a number of many digits; the one in C is five times as fast.
LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


def write_page(folder: Path) -> Path:
    """Write ``report.html`` of a run; missing parts are listed in the report."""
    path = folder / run_files.REPORT
    write_text(path, render_page(folder))
    return path


def write_or_warn(folder: Path) -> None:
    """Write the report; a failure is only a warning, so that it cannot hide the outcome of a training or evaluation."""
    try:
        write_page(folder)
    except Exception as error:  # also of a record of somebody else, with entries of other types
        text = f"warning: {run_store().show(folder)}/report.html could not be written ({one_line(error, 200)})"
        print(printable(text), file=sys.stderr)


def render_page(folder: Path, home: str = "") -> str:
    """Render the report as HTML.

    Args:
        folder: Folder of the run.
        home: URL of the page of all runs, if a server sends the report, which then updates itself.
    """
    test = folder / "evaluation" / "test"
    reader = ReportReader(folder)
    record = reader.get("Record", {}, trust.read_json, folder / run_files.RECORD)
    config, sections = reader.get("Configuration", ({}, []), _read_config, folder / run_files.CONFIG)
    groups = reader.get("Curves", {}, _read_groups, folder / run_files.METRICS)
    scores = reader.get("Test metrics", record.get("test") or {}, trust.read_json, test / "metrics.json")
    scores = {name: math.nan if value is None else value for name, value in scores.items()}
    modes = _modes(config, groups)
    outcomes = read_outcomes(reader, test)
    page = load_template(Path(__file__).with_name("report.html")).render(
        folder=folder,
        home=home,
        place=run_store().show(folder),
        record=record,
        findings=[_with_evidence(each) for each in record.get("findings") or [] if isinstance(each, dict)],
        command=reader.get("Command", "", _command, folder, record),
        choices=config.get("choices") or {},
        sections=sections,
        finals=_final_metrics(groups, modes, scores, record.get("metrics") or {}, record.get("best_after")),
        evaluations=reader.get("Evaluations", [], _read_evaluations, test.parent),
        tested=evaluations.describe(tests) if len(tests := evaluations.of_test(folder)) > 1 else "",
        **outcomes,
        added=[
            (slug(title), title, text)
            for title, file, show in added_sections()
            if (text := reader.section(title, file, show))
        ],
        attempts=reader.get("Attempts", [], _attempts, record.get("attempts") or []),
        missing=reader.missing,
        data={"charts": _charts(groups, modes), **{key: outcomes.get(key) for key in ("confusion", "scatters")}},
    )
    return page.encode(errors="replace").decode()  # the command may contain file names that are not UTF-8


def _command(folder: Path, record: Mapping[str, Any]) -> str:
    """The command that trains this again: of a run that went on with other settings, that which has them all."""
    if any(attempt.get("changed") for attempt in record.get("attempts") or ()):
        return command("train", f"reproduce={run_store().show(folder)}")
    program, *words = shlex.split(redact_command(record.get("command") or "")) or [""]
    started = ["-m", LIBRARY] if program.endswith(f"{LIBRARY}/__main__.py") else [program]
    # A folder that holds a run, such as that of a trial of a search, takes no other.
    return shlex.join(["python", *started, *(word for word in words if not word.startswith("folder="))]) * bool(program)


def _with_evidence(finding: Mapping[str, Any]) -> dict[str, Any]:
    """A finding with lines of its numbers, and its sample; without those that cannot be shown."""
    evidence = _mapping(finding.get("evidence"))
    numbers, sample = evidence.get("numbers"), _mapping(evidence.get("sample"))
    lines, picture = [], None
    for each in map(_mapping, numbers if isinstance(numbers, list) else []):
        shown = [f"{str(key).replace('_', ' ')} {_show(value)}" for key, value in each.items() if key != "of"]
        lines.append((str(each.get("of")), ", ".join(shown)))
    with suppress(KeyError, TypeError, ValueError):  # there is none, or the record is of somebody else
        shape = sample["picture"]["shape"]
        values = np.frombuffer(base64.b64decode(sample["picture"]["pixels"]), np.uint8).reshape(shape)
        picture = pixels.encode_image(values)
    return {**finding, "numbers": lines, "picture": picture, "fields": _mapping(sample.get("fields"))}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        " × ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def added_sections() -> list[tuple[str, str, Callable[[Path], str]]]:
    """Sections whose file a run may have: title, name of the file, and the function that renders it as HTML."""
    others = [(section.title, section.file, extend.load_object(section.render)) for section in extend.sections()]
    return [
        ("Exports", "export/export.json", exports.render_exports),
        ("Pictures and tables", run_files.RECORD, media.render_media),
        *others,
    ]


@dataclass(frozen=True)
class Curve:
    """A column of ``metrics.csv`` at the steps where it has values."""

    name: str
    stage: str  # train, val or ""
    epoch_mean: bool
    step: npt.NDArray[np.int64]  # number of optimizer steps after which each value was measured
    epoch: npt.NDArray[np.int64]
    value: npt.NDArray[np.float64]
    non_finite: int  # number of non-finite values

    def best(self, mode: Mode) -> int:
        """Index of the best value."""
        return int(self.value.argmin() if mode == "min" else self.value.argmax())

    def after(self, steps: int) -> float | None:
        """The value that was measured after a number of steps; of several the last, which a resumed run has logged."""
        (found,) = np.nonzero(self.step == steps)
        return float(self.value[found[-1]]) if found.size else None


def _read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """All evaluations, if there are others than the test after training."""
    found = [trust.read_json(file) | {"name": file.parent.name} for file in sorted(folder.glob("*/settings.json"))]
    for each in found:
        each["metrics"] = trust.read_json(folder / each["name"] / "metrics.json")
    return [] if [each["name"] for each in found] == ["test"] else found


def _read_config(path: Path) -> tuple[dict[str, Any], list[tuple[str, list[str]]]]:
    """Parse the configuration, and split its text into sections; single-line entries form the first one."""
    with files.open_file(path, MAX_CONFIG) as file:
        text = file.read().decode()
    depth = 0
    for token in yaml.scan(text, Loader=LOADER):
        depth += isinstance(token, OPENING) - isinstance(token, CLOSING)
        if depth > trust.MAX_DEPTH or isinstance(token, yaml.AliasToken):
            raise ValueError("aliases, which may multiply, or nested too deeply")
    blocks = [block.splitlines() for block in re.split(r"^(?=[^\s-])", text, flags=re.M) if block.strip()]
    general = [lines[0] for lines in blocks if len(lines) == 1]
    sections = [(lines[0].partition(":")[0], lines[1:]) for lines in blocks if len(lines) > 1]
    return dict(LOADER(text).get_single_data()), [("general", general), *sections]


def _read_groups(path: Path) -> dict[str, list[Curve]]:
    """Group curves by metric, over train and val, steps and epochs."""
    groups: dict[str, list[Curve]] = {}
    for column, logged in MetricsReader(path).read().items():
        group, name, stage, epoch_mean = _parse_column(column)
        at, of_epoch, measured = map(np.asarray, logged)
        finite = np.isfinite(measured)  # other values are counted, not drawn
        if stage == "test" or not finite.any():
            continue
        curve = Curve(name, stage, epoch_mean, at[finite], of_epoch[finite], measured[finite], int((~finite).sum()))
        groups.setdefault(group, []).append(curve)
    return {group: groups[group] for group in sorted(groups, key=lambda group: _rank(group, groups[group]))}


def _rank(group: str, curves: Sequence[Curve]) -> int:
    """Order of charts: loss, other train and val metrics, learning rate, throughput, others."""
    measured = any(curve.stage for curve in curves)
    return [group == "loss", measured, group == "learning rate", "throughput" in group, True].index(True)


def _parse_column(column: str) -> tuple[str, str, str, bool]:
    """Group, name and stage of a column, and whether it holds means of epochs."""
    if column.startswith("lr-"):
        return "learning rate", column.removeprefix("lr-"), "", False
    group, stage, of_epoch = parse_name(column)
    return group, stage or ("epoch mean" if of_epoch else ""), stage, of_epoch


def _modes(config: Mapping[str, Any], groups: Mapping[str, Any]) -> dict[str, Mode]:
    """Mode of each metric: as in a callback that monitors it, else inferred from its name."""
    modes: dict[str, Mode] = {group: mode for group in groups if (mode := infer_mode(group))}
    callbacks = config.get("callback")
    for callback in callbacks.values() if isinstance(callbacks, dict) else ():
        if isinstance(callback, dict) and callback.get("monitor") and callback.get("mode") in ("min", "max"):
            modes[_parse_column(str(callback["monitor"]))[0]] = callback["mode"]
    return modes


def _charts(groups: Mapping[str, Sequence[Curve]], modes: Mapping[str, Mode]) -> list[dict[str, Any]]:
    """Data of the chart of each group; steps are faint behind means of epochs."""
    charts = []
    for group, curves in groups.items():
        means = {curve.stage for curve in curves if curve.epoch_mean}
        series = [_series(curve, faint=not curve.epoch_mean and curve.stage in means) for curve in curves]
        series.sort(key=lambda s: (s["faint"], s["name"]))
        chart = {"title": _title(group), "series": series, "maximize": modes.get(group) == "max", "best": None}
        val = next((curve for curve in curves if curve.stage == "val"), None)
        if val and group in modes:
            index = val.best(modes[group])
            chart["best"] = [int(val.step[index]), shorten(val.value[index])]
        charts.append(chart)
    return charts


def _series(curve: Curve, *, faint: bool) -> dict[str, Any]:
    indices = downsample(curve.value)
    return {
        "name": ", ".join(filter(None, [curve.name, "step" if faint else ""])),
        "stage": curve.stage,
        "faint": faint,
        "non_finite": curve.non_finite,
        "x": curve.step[indices].tolist(),
        "epoch": curve.epoch[indices].tolist(),
        "y": [shorten(value) for value in curve.value[indices]],
    }


def downsample(values: npt.NDArray[np.float64], limit: int = MAX_POINTS) -> npt.NDArray[np.int64]:
    """Indices of at most ``limit`` values: both ends, and minimum and maximum of equal chunks between."""
    indices: npt.NDArray[np.int64] = np.arange(len(values))
    if len(values) <= limit:
        return indices
    size = math.ceil(len(values) / (limit // 2 - 1))
    chunks = np.pad(values, (0, -len(values) % size), mode="edge").reshape(-1, size)
    extremes = [indices[::size] + chunks.argmin(1), indices[::size] + chunks.argmax(1)]
    found: npt.NDArray[np.int64] = np.unique(np.concatenate([[0, len(values) - 1], *extremes]))
    return found


def _final_metrics(
    groups: Mapping[str, Sequence[Curve]],
    modes: Mapping[str, Mode],
    scores: Mapping[str, float],
    recorded: Mapping[str, float],
    tested_after: int | None,
) -> list[dict[str, Any]]:
    """One row per metric: last train and val value, best val value, test value; the loss comes last.

    ``chosen`` is the val value of the checkpoint that is tested, which was saved after ``tested_after`` steps.
    """
    tests = {parse_name(name).group: value for name, value in scores.items()}
    rows: dict[str, dict[str, Any]] = {group: {"test": value} for group, value in tests.items()}
    for name, value in recorded.items():
        group, _, stage, _ = _parse_column(name)
        if stage:
            rows.setdefault(group, {})[stage] = value
    for group, curves in groups.items():
        for curve in sorted((curve for curve in curves if curve.stage), key=lambda curve: curve.epoch_mean):
            last = {curve.stage: float(curve.value[-1]), f"{curve.stage}_at": int(curve.step[-1])}
            rows.setdefault(group, {}).update(last)
            if curve.stage == "val" and tested_after is not None and (chosen := curve.after(tested_after)) is not None:
                rows[group] |= {"chosen": chosen, "chosen_at": tested_after}
            if curve.stage == "val" and group in modes:
                index = curve.best(modes[group])
                rows[group] |= {"best": float(curve.value[index]), "at": int(curve.step[index])}
    found = [{"test": None, "metric": _title(group), **row} for group, row in rows.items()]
    return sorted(found, key=lambda row: row["metric"] == "loss")


def _attempts(recorded: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each attempt with its duration in seconds and the tone of its status."""
    found = []
    for attempt in recorded:
        start, end = (datetime.fromisoformat(attempt[key]) if attempt.get(key) else None for key in ("start", "end"))
        seconds = (end - start).total_seconds() if start and end else None
        found.append({"seconds": seconds, **attempt, "start": start, "tone": _tone(str(attempt.get("reason")))})
    return found


def _tone(reason: str) -> str:
    tones = {"completed": "good", "running": "busy", "interrupted": "warn"}
    return tones.get(reason, "bad" if re.match(r"\w+(Error|Exception|Exit)?:", reason) else "warn")


def slug(title: str) -> str:
    """A title as the id of an element."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _title(group: str) -> str:
    return group.replace("_", " ").replace("/", ", ").replace(" gib", " in GiB")
