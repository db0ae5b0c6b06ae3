"""The page of a comparison: the verdict, and the samples on which models differ, as pictures where they are images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boltcutter import extend
from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.errors import ConfigError, as_config_error
from boltcutter.project import Project
from boltcutter.report.template import load_template

if TYPE_CHECKING:
    from boltcutter_runs.comparison import Comparison

MAX_PICTURES = 50  # of all samples of a page
MAX_READ = 20_000  # samples of the test split that are read to find them


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
    encode_image = extend.require("encode_image", "--html")
    found, last, start = dict[int, dict[str, Any]](), min(max(wanted, default=-1), MAX_READ), 0
    with as_config_error():
        data.prepare_data()  # type: ignore[attr-defined]
        data.setup("test")  # type: ignore[attr-defined]
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
