"""Sequences of different lengths: is a tone rising, falling, steady or trembling?"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from boltcutter import DataModule, Splits

Batch = dict[str, Tensor]


class Tones(DataModule):
    """Noisy tones of 200 to 800 samples; ``collate_fn`` pads those of a batch to its longest.

    Args:
        num_samples: Number of tones.
        num_classes: Number of kinds.
        options: Arguments of ``DataModule``.
    """

    def __init__(self, num_samples: int = 2000, num_classes: int = 4, **options: Any) -> None:
        super().__init__(**options)
        self.num_samples, self.num_classes = num_samples, num_classes
        self.classes = ["rising", "falling", "steady", "trembling"]

    def load(self) -> Splits:
        random = np.random.default_rng(self.seed)
        samples = [(self.tone(random, n % self.num_classes), n % self.num_classes) for n in range(self.num_samples)]
        first, second = int(0.8 * self.num_samples), int(0.9 * self.num_samples)
        return Splits(samples[:first], samples[first:second], samples[second:])

    @staticmethod
    def tone(random: np.random.Generator, kind: int) -> Tensor:
        time = np.linspace(0, 1, random.integers(200, 800))
        pitch = 0.1 + 0.05 * [time, -time, 0 * time, np.sin(20 * time) / 2][kind]
        wave = np.sin(2 * np.pi * (pitch.cumsum() + random.uniform())) + random.normal(scale=1, size=len(time))
        return torch.from_numpy(wave).float()

    @staticmethod
    def collate_fn(samples: list[tuple[Tensor, int]]) -> tuple[Batch, Tensor]:
        """Pad tones (T,) to ``audio`` (B, T), with a ``mask`` (B, T) that is 1 where there is one."""
        tones = [tone for tone, _ in samples]
        audio, mask = pad_sequence(tones, True), pad_sequence([torch.ones(len(tone)) for tone in tones], True)
        return {"audio": audio, "mask": mask}, torch.tensor([kind for _, kind in samples])

    def read(self, paths: Sequence[Path]) -> tuple[list[Any], list[str]]:  # a sample has a target, which is not used
        return [(torch.from_numpy(np.load(path)).float(), 0) for path in paths], [str(path) for path in paths]

    def preprocess(self, tones: list[Any]) -> list[Any]:  # of a request to boltcutter serve
        return [(torch.tensor(tone).float(), 0) for tone in tones]


class Listener(nn.Module):
    """Convolutions, and the mean over the steps that are no padding."""

    def __init__(self, num_classes: int, hidden_size: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(1, hidden_size, 33, padding=16), nn.Conv1d(hidden_size, hidden_size, 9)
        self.head = nn.Linear(2 * hidden_size, num_classes)

    def forward(self, batch: Batch) -> Tensor:
        mask = batch["mask"].unsqueeze(1)  # (B, 1, T)
        found = self.second(nn.functional.pad(self.first(batch["audio"].unsqueeze(1)).relu() * mask, (4, 4))).relu()
        half = mask.cumsum(-1) <= mask.sum(-1, keepdim=True) / 2
        parts = [(found * part).sum(-1) / part.sum(-1) for part in (mask * half, mask * ~half)]  # of each half
        return self.head(torch.cat(parts, dim=1))  # (B, C)
