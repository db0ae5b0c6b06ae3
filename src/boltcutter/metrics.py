"""What the name of a metric tells: its stage, and whether smaller or larger is better."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Mode = Literal["min", "max"]

SMALLER_IS_BETTER = re.compile(r"loss|err|mae|mse|mape|perplexity|nll|bits", re.I)
LARGER_IS_BETTER = re.compile(r"acc|f1|r2|auc|auroc|precision|recall|iou|dice|bleu|pearson|spearman|kappa", re.I)
STAGES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
NAME = re.compile(rf"(?:({'|'.join(STAGES)})[/_.-])?(.+?)(_epoch|_step)?", re.S)


class Name(NamedTuple):
    """The parts of a metric's name: ``val_loss`` and ``val/loss_epoch`` are both the loss of validation."""

    group: str  # what is measured
    stage: str  # train, val, test, or "" for none
    of_epoch: bool  # whether it is the mean of an epoch


def parse_name(name: str) -> Name:
    """The parts of a name."""
    found = NAME.fullmatch(name)
    stage, group, ending = found.groups() if found else (None, name, None)
    return Name(group or name, STAGES.get(stage or "", ""), ending == "_epoch")


def infer_mode(name: str) -> Mode | None:
    """Whether the metric is to fall or to rise; None where its name does not tell."""
    if LARGER_IS_BETTER.search(name):
        return "max"
    return "min" if SMALLER_IS_BETTER.search(name) else None
