"""Pictures and tables that a run logs: ``media/<name>/<step>.png`` and ``media/<name>/<step>.csv``."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from boltcutter.checkpoint.atomic import write_atomically, write_text
from boltcutter.formatting import csv_text
from boltcutter.report.pixels import arrange, encode_png, to_pixels
from boltcutter.run import trust

FOLDER = "media"
MAX_BYTES = 2**24  # of all pictures in a report
MAX_STEPS = 100  # of a picture or table in a report
MAX_ROWS, MAX_COLUMNS = 20, 12  # of a table in a report


class MediaError(ValueError):
    """What was logged is not a picture."""

    hide_traceback = True  # needs no traceback


def write_images(folder: Path, name: str, images: Any, step: int) -> None:
    """Write what ``to_pixels`` takes, or several of it in a grid, as ``media/<name>/<step>.png``."""
    images = images if isinstance(images, list | tuple) else [images]
    try:
        pictures = [pixels for image in images for pixels in to_pixels(image)]
    except ValueError as error:
        raise MediaError(f"log_image: {name}: {error}") from None
    if not pictures:
        raise MediaError(f"log_image: {name}: no images; pass at least one")
    path = _path(folder, name, f"{step}.png")
    write_atomically(path, lambda file: file.write(encode_png(arrange(pictures))))


def write_table(folder: Path, name: str, columns: Sequence[Any] | None, data: Any, dataframe: Any, step: int) -> None:
    """Write a table as CSV, from columns and rows or from a data frame."""
    if dataframe is not None:
        columns, data = list(dataframe.columns), dataframe.to_numpy().tolist()
    rows = [[cell.item() if getattr(cell, "ndim", None) == 0 else cell for cell in row] for row in data or ()]
    table = [*([list(columns)] if columns else []), *rows]
    write_text(_path(folder, name, f"{step}.csv"), csv_text(table))


def discard_after(folder: Path, step: int) -> None:
    """Delete what was logged after ``step``, from which a run is resumed."""
    for file in _files(folder):
        if int(file.stem) > step:
            file.unlink()


def render_media(record: Path) -> str:
    """Render the pictures and tables of the run with this record, and of its evaluations."""
    from boltcutter.report.template import load_template  # which training does not need

    media = read_media(record.parent)
    return load_template(Path(__file__).with_suffix(".html")).render(media=media) if media else ""


def read_media(folder: Path) -> list[dict[str, Any]]:
    """Read pictures and tables for a report: by name, the ``frames`` at some steps, and the number ``of`` all steps.

    Those of evaluations are included. If there are too many, evenly spaced steps are chosen, with the first and last.
    """
    files: dict[str, list[Path]] = {}
    for place in (folder, *sorted((folder / "evaluation").glob("*/"))):
        for file in sorted(_files(place), key=lambda file: (file.parent, int(file.stem))):
            title = place.relative_to(folder) / file.parent.relative_to(place / FOLDER)
            files.setdefault(title.as_posix(), []).append(file)
    found = []
    for name, each in files.items():
        largest = max(file.stat().st_size for file in each)
        limit = max(1, min(MAX_STEPS, MAX_BYTES // len(files) // max(1, largest)))
        count = min(limit, len(each))
        chosen = [each[-1 - round(n * (len(each) - 1) / max(1, count - 1))] for n in reversed(range(count))]
        found.append({"name": name, "frames": [_read(file) for file in chosen], "of": len(each)})
    return found


def _path(folder: Path, name: str, file: str) -> Path:
    """Path of a file below ``media``, wherever its name seems to point."""
    parts = [re.sub(r"[^\w .,=+@()-]", "_", part)[:100] for part in str(name).split("/") if part.strip(". ")]
    path = folder.joinpath(FOLDER, *(parts or ["unnamed"]), file)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _files(folder: Path) -> Iterator[Path]:
    return (file for file in (folder / FOLDER).rglob("*") if re.fullmatch(r"[0-9]+\.(png|csv)", file.name))


def _read(file: Path) -> Mapping[str, Any]:
    if file.suffix == ".csv":
        rows = list(csv.reader(io.StringIO(trust.read_bytes(file).decode(), newline="")))
        return {
            "step": int(file.stem),
            "rows": [row[:MAX_COLUMNS] for row in rows[: MAX_ROWS + 1]],
            "of": len(rows) - 1,
        }
    url = f"data:image/png;base64,{base64.b64encode(trust.read_bytes(file)).decode()}"
    return {"step": int(file.stem), "url": url}
