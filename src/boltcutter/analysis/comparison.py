"""``boltcutter compare --metric``: is the second group of runs better than the first, or was it luck?"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from boltcutter.analysis import caveats, further, luck
from boltcutter.analysis.actions import writing
from boltcutter.analysis.command import parse
from boltcutter.analysis.groups import Group, Result, pair, read_group, settings_of
from boltcutter.analysis.record import find_runs, metric_mode
from boltcutter.analysis.references import runs_folder
from boltcutter.analysis.samples import LOSS, SampleComparison, compare_samples
from boltcutter.analysis.scale import Scale, rounded
from boltcutter.analysis.significance import ALPHA, Estimate, compare_groups, compare_pairs, holm
from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.errors import ConfigError, as_config_error, printable
from boltcutter.formatting import aligned
from boltcutter.project import Project, command
from boltcutter.report.pixels import encode_image
from boltcutter.report.template import load_template
from boltcutter.run.metrics import Mode

PILOT = 5  # seeds to start with
MAX_SEEDS = 200  # beyond which more seeds are not the answer
SHOWN = 10  # samples that changed sides
MAX_PICTURES = 50  # of all samples of a page
MAX_READ = 20_000  # samples of the test split that are read to find them
VALUES = ("--metric", "--mode", "--effect", "--html")
MODES: dict[str | None, Mode | None] = {None: None, "min": "min", "max": "max"}


@dataclass
class Comparison:
    """The second group against the first, with p adjusted for all comparisons, and commands that would decide more."""

    first: Group
    second: Group
    pairs: list[tuple[Result, Result]]
    estimate: Estimate | None
    warnings: list[str]
    samples: SampleComparison | None
    p: float = 1.0
    decision: Literal["better", "worse", "equivalent", "undecided"] = "undecided"
    verdict: str = ""
    commands: list[str] = field(default_factory=list)


def compare_groups_command(project: Project, arguments: list[str]) -> dict[str, Any]:
    """Print the verdicts, warnings and tables, and return all of them."""
    flags, mode, effect, texts = parse_arguments(arguments)
    metric, known = flags["--metric"], find_runs(runs_folder(project, texts))
    groups = [read_group(text, known, metric) for text in texts if not text.startswith("runs=")]
    if len(groups) < 2:
        raise ConfigError(f"compare: {groups[0].label if groups else 'nothing'} is the only group; give a second one")
    mode = mode or metric_mode([r.run for group in groups for r in group.results], metric)
    if mode is None:
        raise ConfigError(f"--metric={metric}: its name does not say which values are better; add --mode=min|max")
    for group in groups[1:]:
        further.check_folds(project, groups[0], group)
    found = [compare(groups[0], group, metric) for group in groups[1:]]
    found[0].warnings += caveats.measured_elsewhere(groups, known, metric)
    decide(found, mode, effect)
    scale = Scale.of(metric, mode, [value for group in groups for value in group.values])
    for comparison in found:
        seeds, ending = plan(comparison, scale, effect)
        for group, lacking in zip((comparison.first, comparison.second), seeds, strict=True):
            comparison.commands += further.commands(project, group, lacking)
        comparison.verdict = describe(comparison, scale, effect, len(found)) + ending
    lasting = [further.lasting_filter(group, known) for group in groups] if any(c.commands for c in found) else []
    if lasting and lasting != [group.label for group in groups]:  # such as the folder of a search
        options = [f"{flag}={value}" for flag, value in flags.items() if flag in ("--mode", "--effect")]
        options += [text for text in texts if text.startswith("runs=")]
        found[-1].commands.append(command("compare", "--metric", metric, *options, *lasting))
    lines = "\n".join(_lines(groups, found, scale))
    print(printable(lines))
    if reads := luck.describe(known, metric, [r.run for group in groups for r in group.results]):
        print(printable(f"note: {reads}"), file=sys.stderr)
    if page := flags.get("--html"):
        with writing(f"--html={page}", "choose another file"):
            write_page(Path(page), project, f"{metric}: {len(groups)} groups", printable(lines), found)
        print(page, file=sys.stderr)
    return as_dict(groups, found) | {"test_reads": reads}


def compare(first: Group, second: Group, metric: str) -> Comparison:
    """Compare two groups; raises ConfigError if that would be unfair."""
    pairs = pair(first, second)
    warnings, estimate = [*first.warnings, *second.warnings, *caveats.find_caveats(first, second, pairs, metric)], None
    if len(pairs) > 1:
        estimate = compare_pairs([b.value - a.value for a, b in pairs], pairs[0][0].num_folds)
    elif min(len(first.values), len(second.values)) > 1:
        estimate = compare_groups(first.values, second.values)
    else:
        warnings.append("one run of a group says nothing about others: a difference may be the luck of its seed")
    both = pairs or ([] if estimate else [(first.results[0], second.results[0])])
    return Comparison(first, second, pairs, estimate, warnings, compare_samples(both, metric))


def decide(found: Sequence[Comparison], mode: Mode, effect: float | None) -> None:
    """Set the adjusted p values and the decisions of all comparisons."""
    estimated = [(comparison, comparison.estimate) for comparison in found if comparison.estimate]
    for (comparison, estimate), p in zip(estimated, holm([e.p for _, e in estimated]), strict=True):
        comparison.p = p
        if p <= ALPHA:
            comparison.decision = "better" if (estimate.difference > 0) == (mode == "max") else "worse"
        elif effect and estimate.interval and max(map(abs, estimate.interval)) < effect:
            comparison.decision = "equivalent"


def plan(comparison: Comparison, scale: Scale, effect: float | None) -> tuple[tuple[list[int], list[int]], str]:
    """The seeds that each group needs for a decision, and the end of the verdict that announces them."""
    first, second, estimate, total = comparison.first, comparison.second, comparison.estimate, PILOT
    if comparison.decision != "undecided" or settings_of(first.results) == settings_of(second.results):
        return ([], []), ""
    if estimate and not estimate.error and not estimate.difference:
        return ([], []), "; all results are equal"
    if estimate:
        size, folds = effect or abs(estimate.difference), first.results[0].num_folds or 1
        count = estimate.needed(size) if size else None
        if count is None or count > MAX_SEEDS * folds:
            why = "no number of repeated folds" if estimate.floor else f"not even {MAX_SEEDS} seeds"
            remedy = "" if effect else "; give --effect the smallest difference that matters"
            return ([], []), f"; {why} would show a difference of {scale.size(size)}{remedy}"
        total = math.ceil(max(count, estimate.count + 1) / folds)
    seeds = further.further_seeds(first, second, total)
    more = max(map(len, seeds))
    return seeds, f"; run {more} more {'seed' if more == 1 else 'seeds'}:"


def describe(comparison: Comparison, scale: Scale, effect: float | None, comparisons: int) -> str:
    """The verdict in one sentence."""
    first, second, estimate = comparison.first, comparison.second, comparison.estimate
    verdict = {
        "better": f"{second.label} is better than {first.label}",
        "worse": f"{second.label} is worse than {first.label}",
        "equivalent": f"{second.label} and {first.label} differ by less than {scale.size(effect or 0)}",
        "undecided": f"not decided whether {second.label} is better than {first.label}",
    }[comparison.decision]
    if not estimate:
        difference = statistics.fmean(second.values) - statistics.fmean(first.values)
        return f"{verdict}: {scale.signed(difference)}, {len(second.values)} and {len(first.values)} runs"
    count = (
        f"{len(comparison.pairs)} pairs" if comparison.pairs else f"{len(second.values)} and {len(first.values)} runs"
    )
    adjusted = f" (Holm, {comparisons} comparisons)" if comparisons > 1 else ""
    return f"{verdict}: {scale.estimate(estimate.difference, estimate.interval, comparison.p)}{adjusted}, {count}"


def as_dict(groups: Sequence[Group], found: Sequence[Comparison]) -> dict[str, Any]:
    """Everything that was found, as plain values."""
    comparisons = [
        {name: getattr(c, name) for name in ("decision", "verdict", "commands", "warnings")}
        | {"first": c.first.label, "second": c.second.label, "pairs": len(c.pairs), "p_adjusted": c.estimate and c.p}
        | {"estimate": c.estimate and asdict(c.estimate) | {"smallest_effect": c.estimate.smallest_effect()}}
        | {"samples": c.samples and asdict(c.samples)}
        for c in found
    ]
    runs = [{result.run.folder: result.value for result in group.results} for group in groups]
    named = [{"label": g.label, "trials": g.trials, "runs": r} for g, r in zip(groups, runs, strict=True)]
    return {"groups": named, "comparisons": comparisons}


def _lines(groups: Sequence[Group], found: Sequence[Comparison], scale: Scale) -> Iterator[str]:
    """The verdicts, the warnings, and the tables."""
    for comparison in found:
        yield from (comparison.verdict, *(f"  {command}" for command in comparison.commands))
    yield from dict.fromkeys(f"warning: {warning}" for comparison in found for warning in comparison.warnings)
    rows = [["group", "runs", "mean ± std", "min", "max"]]
    for group in groups:
        spread = f" ± {rounded(statistics.stdev(group.values), 2)}" if len(group.values) > 1 else ""
        ends = [rounded(end, 4) for end in (min(group.values), max(group.values))]
        rows.append(
            [group.label, str(len(group.values)), f"{rounded(statistics.fmean(group.values), 4)}{spread}", *ends]
        )
    yield from ("", *aligned(rows))
    rows = [["compared", "difference", "95% interval", "p", "effect size", "80% power from", "test"]]
    for c, e in ((c, c.estimate) for c in found if c.estimate):
        effect = "–" if e.effect is None else f"{'dz' if c.pairs else 'g'} = {e.effect:.2f}"
        shown = [scale.signed(e.difference, e.interval), scale.interval(e.interval), f"{c.p:.2g}", effect]
        rows.append([c.second.label, *shown, scale.size(e.smallest_effect()) if e.error else "–", e.test])
    yield from ("", *aligned(rows)) if len(rows) > 1 else ()
    for comparison in found:
        yield from _sample_lines(comparison, comparison.samples) if comparison.samples else ()


def _sample_lines(comparison: Comparison, found: SampleComparison) -> Iterator[str]:
    """What the comparison on samples has found."""
    scale = Scale(1.0, "") if found.measure == LOSS else Scale(100.0, " points")
    these = "these two models" if found.pairs == 1 else f"these {found.pairs} pairs of models"
    shown = scale.estimate(found.difference, found.interval, found.p)
    yield from ("", f"{found.measure} of {these} on {found.count} samples: {shown} ({found.test})")
    rows = [["index", "target", comparison.first.label, comparison.second.label]]
    names = ("index", "target", *(("first", "second") if found.pairs == 1 else ("first_outcome", "second_outcome")))
    rows += [[f"{sample[name]:.6g}" if name in sample else "" for name in names] for sample in found.changed[:SHOWN]]
    if found.pairs > 1 and len(rows) > 1:
        yield f"{found.measure} of each sample, as a mean of the pairs:"
    yield from aligned(rows) if len(rows) > 1 else ()
    if len(found.changed) > SHOWN:
        yield f"… and {len(found.changed) - SHOWN} more samples"


def parse_arguments(arguments: Sequence[str]) -> tuple[dict[str, str], Mode | None, float | None, list[str]]:
    """Flags, mode, effect and the other arguments; raises ConfigError."""
    flags, texts = parse(arguments, VALUES)
    given, text = flags.get("--mode"), flags.get("--effect")
    if given not in MODES:
        raise ConfigError(f"--mode={given}: neither min nor max; say which values of {flags['--metric']} are better")
    effect = None
    with suppress(ValueError):
        effect = float(text) if text else None
    if text and not (effect and 0 < effect < math.inf):
        raise ConfigError(f"--effect={text}: not a positive number; give the smallest difference that matters")
    return flags, MODES[given], effect, texts


def write_page(path: Path, project: Project, title: str, text: str, found: Sequence[Comparison]) -> None:
    """Write the page: ``text`` are the verdicts, warnings and tables; data modules of the project read the samples."""
    shown, left = list[dict[str, Any]](), MAX_PICTURES
    for comparison, samples in ((c, c.samples) for c in found if c.samples and c.samples.changed):
        chosen: list[dict[str, Any]] = [dict(sample) for sample in samples.changed[:left]]
        left, note = left - len(chosen), ""
        try:
            one = comparison.pairs[0][0] if comparison.pairs else comparison.first.results[0]
            pictures = read_pictures(project, one.folder, {s["index"]: s.get("target") for s in chosen})
            chosen = [sample | {"image": pictures.get(int(sample["index"]))} for sample in chosen]
        except (ConfigError, OSError) as error:
            note = str(error)
        shown.append({"of": comparison, "samples": chosen, "note": note})
    page = load_template(Path(__file__).with_name("samples.html")).render(title=title, text=text, found=shown)
    write_text(path, page.encode(errors="replace").decode())


def read_pictures(project: Project, folder: Path, wanted: Mapping[float, float | None]) -> dict[int, dict[str, Any]]:
    """Images of the test split of a run by index, of samples whose index and target are ``wanted``.

    Raises:
        ConfigError: The record names a class that is not trusted, or the data cannot be read.
    """
    from boltcutter.assembly.assemble import complete_config  # slow imports
    from boltcutter.assembly.overrides import load_run_config
    from boltcutter.config.instantiate import build
    from boltcutter.protocols import NativeData

    data = build(complete_config(load_run_config(project, folder)).data, "data")
    if not isinstance(data, NativeData):
        raise ConfigError(f"{type(data).__name__} has no splits that can be read one by one")
    found, last, start = dict[int, dict[str, Any]](), min(max(wanted, default=-1), MAX_READ), 0
    with as_config_error():
        data.prepare_data()  # type: ignore[attr-defined]
        data.setup(stage="test")  # type: ignore[attr-defined]
        for inputs, targets in data.loader("test"):
            for place in range(len(targets)):
                pixels = inputs[place].float()  # (C, H, W)
                if start + place in wanted and pixels.ndim == 3 and len(pixels) in (1, 3):
                    if float(targets[place]) != wanted[start + place]:
                        raise ConfigError(f"{folder}: its data have other targets now")
                    low, high = (0.0, 255.0) if inputs.dtype.itemsize == 1 else (pixels.min(), pixels.max())
                    scaled = (pixels - low) / max(float(high - low), 1e-9) * 255
                    found[start + place] = encode_image(scaled.round().byte().numpy())
            start += len(targets)
            if start > last:
                break
    return found
