"""The export command: write a run's model in each format, verify it, and report what it costs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from boltcutter import files, run_files
from boltcutter.assembly.assemble import Components, assemble, complete_config
from boltcutter.assembly.overrides import load_evaluation_config
from boltcutter.checkpoint.atomic import write_text
from boltcutter.checkpoint.load import load_checkpoint
from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError, as_config_error
from boltcutter.config.instantiate import build, checked
from boltcutter.config.settings import Settings
from boltcutter.config.values import split_overrides
from boltcutter.data.seeding import seeded_generators
from boltcutter.data.streams import Purpose, stream
from boltcutter.environment.warning_filters import filter_warnings
from boltcutter.evaluation.splits import loader_owner
from boltcutter.export import hub, table
from boltcutter.export.calibration import stratified
from boltcutter.export.card import add_result, write_card
from boltcutter.export.program import ModuleProgram, Program, TaskProgram
from boltcutter.export.settings import Export, ExportError, Format
from boltcutter.export.verify import Reference, Result, verify
from boltcutter.formatting import to_json
from boltcutter.project import LIBRARY, Project
from boltcutter.protocols import NativeData, NativeTask
from boltcutter.report import page as html
from boltcutter.run import trust
from boltcutter.run.best import find_checkpoint
from boltcutter.run.folder import writable_place

RESULTS = "export.json"
RESTORED = ("statistics", "input_structure")  # of the state of a data module, without its position
PROBES = 8  # batches that show which sizes vary
CALIBRATION = 256  # samples from which ranges of activations are found


@dataclass
class ExportSettings:
    """Configuration of the export command besides that of the run."""

    export: Export


def export_command(project: Project, overrides: list[str]) -> dict[str, Result]:
    """Export a run, verify each file in a new process, and upload what is good enough.

    Args:
        project: Project whose configuration is used.
        overrides: ``run=<folder>`` and ``export=<formats>``; ``ckpt=best|last|<path>``; ``export.<key>=<value>``; other
            overrides change the run's configuration.

    Returns:
        How the original and each export perform, by format.

    Raises:
        ConfigError: The run, a format or an override does not exist, or a package is missing.
        ExportError: The model cannot be exported, or an export loses more than ``export.max_drop``.
    """
    filter_warnings()
    special, rest = split_overrides(overrides, "run", "ckpt")
    own = [override for override in rest if override.lstrip("+~").partition("=")[0].partition(".")[0] == "export"]
    settings = read_settings(project, own)
    if settings.push is not None:
        hub.check_repository(settings.push)
    cfg, folder = load_evaluation_config(project, special, [override for override in rest if override not in own])
    cfg = complete_config(cfg.changed({"trainer": {"accelerator": "cpu"}}))
    checkpoint = find_checkpoint(cfg.place, special.get("ckpt", "best"))
    results = export(project, settings, cfg, folder, checkpoint)
    if settings.push is not None:
        print(hub.push(writable_place(folder, cfg.runs) / "export", list(settings.formats), settings.push))
    return results


def export(project: Project, settings: Export, cfg: Settings, folder: Path, checkpoint: str) -> dict[str, Result]:
    """Write and verify each format.

    Returns:
        How the original and each export perform, by format.

    Raises:
        ConfigError: The data has no samples.
        ExportError: The model cannot be exported, or an export loses more than ``export.max_drop``.
    """
    components = assemble(cfg, with_callbacks=False)
    restore(components, checkpoint)
    split = next((name for name in ("test", "val", "train") if has_split(components, name)), None)
    if split is None:
        raise ConfigError(
            f"run={folder}: {type(components.data or components.task).__name__} has no samples; add a test_dataloader"
        )
    with quiet():
        program = make_program(components, next(iter(batches(components, split))), probes(components, split))
        program.capture()
        reference = Reference(program, lambda: batches(components, split))
        results = {"fp32": reference.result(sum(weight.numel() * 4 for weight in program.core.parameters()))}
        place = writable_place(folder, cfg.runs)
        foreign = {"lightning", "pytorch_lightning", LIBRARY}
        foreign |= {project.package} if project.package else set()
        for name, form in settings.formats.items():
            print(f"export={name}", flush=True)
            inputs = partial(calibration, components, program, split, CALIBRATION)
            target = place / "export" / name
            if link := files.foreign_link(target, below=place):
                raise ExportError(f"{link} is a link of another user; remove it")
            files.make_empty(place, target)
            form.write(program, target / form.file, inputs)
            write_model_config(target, form, cfg)
            write_card(target, name, form, program, components.data, run=folder, checkpoint=checkpoint, project=project)
            results[name] = verify(reference, results["fp32"], target, foreign)
            add_result(target, results[name])
            if not form.is_runnable:
                hub.write_readme(target)
            save_results(place, results, split, checkpoint)
    table.show(results)
    print(f"\n{place / 'export'}")
    if place == folder and (folder / run_files.REPORT).is_file():
        html.write_or_warn(folder)
    check_drop(results, settings.max_drop)
    return results


def read_settings(project: Project, overrides: Sequence[str]) -> Export:
    """Compose and check the settings of the export."""
    chosen = [override.partition("=")[2] for override in overrides if override.startswith("export=")]
    if not chosen or chosen[-1].strip("[] ") in ("", "null"):
        raise ConfigError(f"export: not set; give export=…{project.list_options('export')}", kind="missing_value")
    content = compose(project, overrides, base=Settings({})).texts
    cfg = checked(Settings({"export": content["export"]}), ExportSettings)
    settings: Export = build(cfg.get("export"), "export")
    for name, form in settings.formats.items():
        if missing := next((package for package in form.packages if find_spec(package) is None), None):
            raise ConfigError(
                f"export={name}: {missing} is not installed; pip install '{LIBRARY}[export]'", kind="not_installed"
            )
    return settings


def restore(components: Components, checkpoint: str) -> None:
    """Load the weights, and what the data module keeps in checkpoints."""
    state = load_checkpoint(checkpoint)
    data: Any = components.data
    task, is_native = components.task, isinstance(components.data, NativeData)
    with as_config_error():
        if data is not None:
            data.prepare_data()
        if is_native:
            kept = state.get(type(data).__qualname__, {})
            data.load_state_dict({"statistics": {}} | {key: kept[key] for key in RESTORED if key in kept})
            data.setup(stage="fit")
        if not isinstance(task, NativeTask):  # whose hooks may create layers, or use the trainer
            components.trainer.strategy.connect(task)
            task.trainer = components.trainer
            task.prepare_data()
            task.configure_model()
            task.setup(stage="test")
        if not is_native and data is not None:
            data.trainer = components.trainer
            data.setup(stage="test")
    task.trainer = None  # which cannot be copied
    task.load_state_dict(state["state_dict"], strict=task.strict_loading)


def has_split(components: Components, split: str) -> bool:
    """Whether there is a loader of a split, with samples."""
    data = components.data
    if isinstance(data, NativeData) and split in data.empty_splits:
        return False
    is_given = loader_owner(data, components.task, split) is not None
    return is_given and next(iter(batches(components, split)), None) is not None


def make_program(components: Components, batch: Any, others: Iterable[Any] = ()) -> Program:
    """Wrap the task with its pre- and post-processing; ``others`` are batches that show which sizes vary."""
    task, data = components.task, components.data
    if isinstance(task, NativeTask):
        return TaskProgram(task, batch, getattr(data, "statistics", {}), others)
    return ModuleProgram(task, batch, others)


def probes(components: Components, split: str) -> list[Any]:
    """A few small batches, as samples of different lengths may all be in one large batch."""
    data: Any = components.data
    if isinstance(data, NativeData):
        size, data.batch_size = data.batch_size, 2
        try:
            return [*islice(batches(components, split), PROBES)]
        finally:
            data.batch_size = size
    owner: Any = loader_owner(data, components.task, split)
    loaders = getattr(owner, f"{split}_dataloader")()
    loader = loaders[0] if isinstance(loaders, list | tuple) else loaders
    dataset: Any = getattr(loader, "dataset", None)
    if type(loader) is DataLoader and loader.batch_size and not isinstance(dataset, IterableDataset):
        pairs = [range(at, at + 2) for at in range(0, min(len(dataset) - 1, 2 * PROBES), 2)]
        return [loader.collate_fn([dataset[index] for index in pair]) for pair in pairs]
    return [*islice(batches(components, split), PROBES)]


def batches(components: Components, split: str) -> Iterator[Any]:
    """Batches of a split, in the main process."""
    data: Any = components.data
    if isinstance(data, NativeData):
        with as_config_error():
            yield from data.loader(split)
        return
    owner: Any = loader_owner(data, components.task, split)
    loader = getattr(owner, f"{split}_dataloader")()
    loaders = loader if isinstance(loader, list | tuple) else [loader]
    yield from loaders[0] if loaders else ()


def calibration(components: Components, program: Program, fallback: str, samples: int) -> Iterator[tuple[Any, ...]]:
    """Inputs of training samples, seeded, and of all classes; of the tested samples if there is no train split."""
    data: Any = components.data
    with seeded_generators(stream(Purpose.EXAMPLES, 0)):
        if not has_split(components, "train"):
            found = batches(components, fallback)
        else:
            found = data.loader("train", shuffle=True) if isinstance(data, NativeData) else batches(components, "train")
        for inputs in stratified(map(program.split, found), samples):
            yield program.with_cache(inputs)


def write_model_config(folder: Path, form: Format, cfg: Settings) -> None:
    """Write the configuration of the model beside plain weights, from which it can be built again."""
    if not form.is_runnable:
        values = cfg.redacted
        content = {"model": values.get("model") or values["task"]}
        write_text(folder / "config.json", to_json(content, indent=2) + "\n")


def save_results(folder: Path, results: dict[str, Result], split: str, checkpoint: str) -> None:
    """Write ``export.json``; results of other formats that were exported from the same checkpoint are kept."""
    path = folder / "export" / RESULTS
    kept: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # a file that another program has written or damaged is replaced
        match trust.read_json(path):
            case {"split": then, "results": {"fp32": {"value": value}} as earlier}:
                if (then, value) == (split, results["fp32"].value):  # of the same weights, wherever they are
                    kept = earlier
    found = kept | {name: asdict(result) for name, result in results.items()}
    content = {"split": split, "checkpoint": checkpoint, "results": found}
    write_text(path, to_json(content, indent=2) + "\n")


def check_drop(results: dict[str, Result], limit: float) -> None:
    """Check that no export lost too much."""
    original = results["fp32"]
    for name, result in results.items():
        if not result.drop <= limit:
            unit = "points" if result.metric == "accuracy" else "%"
            raise ExportError(
                f"export={name}: {result.metric} {result.value:.4f} instead of {original.value:.4f} is worse by "
                f"{result.drop:.2f} {unit}, more than export.max_drop={limit}; use another format, or raise it"
            )


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the log messages of exporters, which name internals; their warnings are filtered already."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
