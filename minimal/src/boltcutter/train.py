"""Train and test, from a configuration."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch import nn, zeros

from boltcutter import run
from boltcutter.build import build, check
from boltcutter.checkpoint import load
from boltcutter.config import ConfigError, DictConfig, one_line


@dataclass
class Config:
    """The top level of ``configs/train.yaml``, where a comment tells what each is."""

    data: L.LightningDataModule
    model: nn.Module
    task: L.LightningModule
    optimizer: Callable[..., Any]
    trainer: L.Trainer
    callback: dict[str, Callback | None] | None
    logger: dict[str, Logger | None] | None
    choices: dict[str, str]
    name: str
    seed: int
    runs: Path
    folder: Path | None
    id: str | None
    test: bool
    resume: Path | None


def main(configs: Path, words: list[str], *, only_check: bool = False) -> None:
    """Train as the words say, or only look for mistakes.

    Raises:
        ConfigError: There are some, a line for each.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*(many workers|not empty|logging interval|not resumable|LeafSpec|`srun`).*")
    cfg = run.read_words(configs, words)
    if mistakes := check(cfg, Config):
        raise ConfigError("\n".join(mistakes))
    if cfg.folder and not cfg.resume and last_checkpoint(cfg.folder):
        raise ConfigError(f"folder={cfg.folder} holds a run; say resume={cfg.folder} to go on with it")
    with run.run_id() as name, leaving_together():
        cfg.folder = cfg.folder or str(Path(cfg.runs, cfg.name, name))
        cfg.id = Path(cfg.folder).name
        parts = assemble(cfg)
        if only_check:
            print("ok")
        else:
            train(cfg, *parts)


def train(cfg: DictConfig, trainer: L.Trainer, data: Any, task: Any) -> None:
    """Fit, from where the folder's last checkpoint is, and measure the best weights on the test split."""
    folder, last = Path(cfg.folder), last_checkpoint(cfg.folder)
    if trainer.is_global_zero:
        run.create(cfg)
    with run.attempt(folder, resumed=bool(last), ranks=trainer.world_size):
        trainer.fit(task, data, ckpt_path=last)
        if cfg.test:
            best = folder / "checkpoints" / "best.ckpt"
            (scores,) = trainer.test(task, data, ckpt_path=best if best.is_file() else None, verbose=False)
            if trainer.is_global_zero:
                run.update_record(folder, test=dict(scores))
                print(*(f"{name} {score:.4f}" for name, score in scores.items()), folder, sep="  ")


def assemble(cfg: DictConfig) -> tuple[L.Trainer, Any, Any]:
    """Make trainer, data and task, and see that they go together, and with the checkpoint to go on from.

    Raises:
        ConfigError: They do not.
    """
    if not 0 <= cfg.seed < 2**32:
        raise ConfigError(f"seed={cfg.seed} is not in [0, 4294967295]; try 0")
    L.seed_everything(cfg.seed, verbose=False)
    watchers, loggers = (filter(None, build(cfg[room] or {}, room).values()) for room in ("callback", "logger"))
    late = {"callbacks": list(watchers), "logger": list(loggers), "default_root_dir": cfg.folder}
    trainer = build(cfg.trainer, "trainer", **late)
    started = int(os.environ.get("WORLD_SIZE", trainer.world_size))
    if started != trainer.world_size:
        raise ConfigError(
            f"trainer.devices={trainer.num_devices}, trainer.num_nodes={trainer.num_nodes}: {started} processes were "
            "started; say trainer=ddp, and as many devices as there are processes on each node"
        )
    data, task, last = build(cfg.data, "data"), build(cfg.task, "task"), last_checkpoint(cfg.folder)
    try:
        data.trainer = trainer
        data.setup("fit")
        if last:
            saved = load(last)
            data.load_state_dict(saved[type(data).__qualname__])
            task.load_state_dict(saved["state_dict"])
        data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
        task.optimizer([nn.Parameter(zeros(1))])
        for metric in filter(None, (getattr(callback, "monitor", None) for callback in trainer.callbacks)):
            if metric not in task.logged:
                raise ValueError(f"monitor={metric}: never logged (there are: {', '.join(task.logged)})")
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(one_line(error)) from error
    return trainer, data, task


def last_checkpoint(folder: str) -> Path | None:
    """What a run in ``folder`` would go on from."""
    path = Path(folder, "checkpoints", "last.ckpt")
    return path if path.is_file() else None


@contextmanager
def leaving_together() -> Iterator[None]:
    """After the block, wait for the other ranks and hang up: one that just ended would look as if it had failed."""
    failed = False
    try:
        yield
    except Exception:
        failed = True  # the others learn of it at once
        raise
    finally:
        if dist.is_available() and dist.is_initialized():
            if not failed:
                dist.barrier()
            dist.destroy_process_group()
