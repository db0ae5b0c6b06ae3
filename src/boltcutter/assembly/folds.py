"""Check before training that the folds of a cross-validation divide the data."""

from __future__ import annotations

from collections.abc import Iterable

import lightning as L

from boltcutter.config import instantiate as build
from boltcutter.config.compose import DictConfig, merge
from boltcutter.config.errors import ConfigError, as_config_error
from boltcutter.data.fold_contents import FoldContents, find_fault, read_fold
from boltcutter.data.hooks import seed_hooks
from boltcutter.data.seeding import seeded_generators


def check_folds(cfg: DictConfig, trainer: L.Trainer, folds: Iterable[int]) -> None:
    """Load the data of some folds, one after the other, and compare their train and val splits.

    Args:
        cfg: Configuration with ``data.num_folds``.
        trainer: Attached to the data modules.
        folds: At least two folds.

    Raises:
        ConfigError: Folds share validation samples, a fold validates on train samples, or the folds do not cover the
            data.
    """
    contents = {fold: _load_fold(cfg, trainer, fold) for fold in folds}
    with as_config_error():
        fault = find_fault(contents, cfg.data.num_folds)
    if fault:
        raise ConfigError(
            f"data.num_folds={cfg.data.num_folds}: {fault}; in {cfg.data._target_}, divide the samples by "
            "boltcutter.split_indices(…, num_folds=num_folds, fold=fold)"
        )
    read = min(split.fraction for found in contents.values() for split in found)
    if read < 1:
        print(f"data.num_folds={cfg.data.num_folds}: the folds were compared by {read:.1%} of the samples of a split")


def check_fold(cfg: DictConfig, trainer: L.Trainer) -> None:
    """Compare the fold of a run, if it has one, with the next fold; see ``check_folds``."""
    if (cfg.data or {}).get("num_folds"):
        fold = cfg.data.get("fold", 0)
        check_folds(cfg, trainer, (fold, (fold + 1) % cfg.data.num_folds))


def _load_fold(cfg: DictConfig, trainer: L.Trainer, fold: int) -> FoldContents:
    """Load and read one fold, with the random splits that training would have."""
    with seeded_generators(0), as_config_error():  # only restores the generators
        L.seed_everything(cfg.seed, verbose=False)
        data = build.build(merge(cfg, DictConfig({"data": {"fold": fold}})).data, "data")
        seed_hooks(data, cfg.seed)
        data.trainer = trainer
        data.prepare_data()
        data.setup("fit")
        return read_fold(data)
