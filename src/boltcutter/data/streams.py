"""The seed of every random number: one function, and one list of what random numbers are drawn for.

Nothing is imported here, as commands that need no torch draw random numbers too.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache, reduce
from typing import Any

MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """What random numbers are drawn for. No two purposes share a stream."""

    INITIALIZATION = 0  # constructors of the data module and the task, such as initial weights
    SETUP = 1  # prepare_data and setup, such as random_split
    SPLIT = 2  # division of samples into train, val and test
    FOLDS = 3  # division of samples into folds
    ORDER = 4  # permutation of the samples of an epoch
    SAMPLER = 5  # what a sampler draws in an epoch
    WINDOWS = 6  # where the windows of an epoch of tokens begin
    SAMPLES = 7  # what datasets, transforms and collate functions draw for a sample or batch
    STREAM = 8  # what a dataset without random access draws when its iteration begins, such as an order
    WORKER = 9  # what a worker process draws before its first batch
    PROBE = 10  # first batches of workers, which are compared and thrown away
    FIT = 11  # what the task and the callbacks draw before the first epoch
    EPOCH_START = 12  # what they draw at the start of an epoch
    EPOCH_END = 13  # what they draw at the end of an epoch
    TRANSFER = 14  # hooks around the transfer of a batch to the device, such as augmentation there
    STEP = 15  # a training step, such as dropout and noise
    EVALUATION_START = 16  # what is drawn before the first batch of validation, test or prediction
    EVALUATION = 17  # a step of validation, test or prediction
    GENERATION = 18  # tokens that a language model generates
    SYNTHETIC = 19  # contents of synthetic samples
    FINGERPRINT = 20  # samples that are read for the fingerprint of a dataset, or to compare folds
    EXAMPLES = 21  # samples that are chosen to calibrate or to verify an exported model
    CHECK = 22  # inputs of the checks of devices
    SEARCH = 23  # values that a search samples
    BOOTSTRAP = 24  # resampled differences of compared runs


STAGES = {"train": 0, "val": 1, "test": 2, "predict": 3}


def stream(
    purpose: Purpose,
    seed: int,
    *,
    stage: str = "train",
    epoch: int = 0,
    position: int = 0,
    loader: int = 0,
    rank: int = 0,
    worker: int = 0,
    generator: int = 0,
) -> int:
    """Return the 64-bit seed of a stream of random numbers, which nothing else uses.

    Initialization has the seed itself: initial weights are those of plain Lightning after ``seed_everything(seed)``.

    Args:
        purpose: What is drawn.
        seed: Seed of the run; any integer.
        stage: ``train``, ``val``, ``test`` or ``predict``.
        epoch: Number of the epoch.
        position: Number of the batch, of the sample in the order of the epoch, or of the trial.
        loader: Number of the loader, among several of a stage.
        rank: Rank of the process, where ranks draw different numbers.
        worker: Number of the worker process, where workers draw different numbers.
        generator: 0 for the global generators, else the number of a generator that an object holds, from 1.
    """
    if purpose is Purpose.INITIALIZATION:
        return seed
    use = purpose | STAGES[stage] << 8 | loader << 16 | generator << 40
    return _mix(_hash_of_epoch(seed, use, rank | worker << 32, epoch), position)


def seed32(stream: int) -> int:
    """Seed of 32 bits, for libraries that take no more."""
    return stream >> 32


def hash64(*numbers: int) -> int:
    """Hash integers to 64 bits.

    Source: Steele et al., Fast Splittable Pseudorandom Number Generators, 2014 (SplitMix64's finaliser).
    """
    return reduce(_mix, numbers, 0x9E3779B97F4A7C15)


def _mix(key: int, number: int) -> int:
    key = ((key ^ number) * 0xBF58476D1CE4E5B9) & MASK
    key ^= key >> 27
    key = (key * 0x94D049BB133111EB) & MASK
    return key ^ key >> 31


_hash_of_epoch = lru_cache(256)(hash64)  # each step, and each sample, differs in the last number only


def evaluated_split(trainer: Any, tested: str | None = None) -> str:
    """The split that a trainer evaluates: in a test ``tested``, by default the ``tested_split`` that a callback has."""
    if not trainer.testing:
        return "predict" if trainer.predicting else "val"
    return tested or next((c.tested_split for c in trainer.callbacks if hasattr(c, "tested_split")), "test")
