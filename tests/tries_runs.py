"""Runs of the baseline of a try, as training records them."""

import platform
from pathlib import Path

from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.compose import compose
from boltcutter.environment import user_key
from boltcutter.formatting import to_json
from boltcutter.project import Project
from boltcutter.run import lineage
from boltcutter.tries.ledger import Entry

ENTRY = Entry(
    **dict.fromkeys(("time", "question", "change", "baseline", "metric", "mode", "effect", "margin", "verdict"), ""),
    **dict.fromkeys(("difference", "low", "high"), None),
    **dict.fromkeys(("pairs", "budget", "runs", "reused"), 1),
    id="a",
    seconds=1.0,
    is_stopped=False,
    seeds=[1],
    baseline_overrides=[],
    change_overrides=["optimizer.lr=0.1"],
)


def write_baseline(project: Project, folder: Path, seed: int, **facts: object) -> Path:
    """A completed run of the baseline, as training records it."""
    record = {
        "config": compose(project, ["model=mlp", f"seed={seed}", f"folder={folder}"]).written,
        "attempts": [{"reason": "completed", "seconds": 2.0}],
        "git": {"commit": "c0ffee", "changes": None},
        "library": {},
        "packages": lineage.packages(),
        "python": platform.python_version(),
        "hardware": lineage.hardware(),
        "metrics": {"val/loss": 0.5},
        "data": f"data of seed {seed}",
    }
    record |= {"signature": user_key.sign(record["config"])}
    folder.mkdir(parents=True)
    write_text(folder / "record.json", to_json(record | facts, default=str))
    return folder
