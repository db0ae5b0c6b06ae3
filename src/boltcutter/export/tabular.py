"""Encode raw rows of a table as features, as ``boltcutter.data.tabular`` does, by tensor operations only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def describes_table(statistics: Mapping[str, Any]) -> bool:
    """Whether these are the statistics of a table."""
    return {"columns", "numbers", "categories"} <= statistics.keys()


class TableEncoder(nn.Module):
    """Standardize numbers and one-hot encode categories.

    A raw row has one float64 for each column: a number, or the index of a category; NaN is a missing value, and a
    negative index an unknown category. Shapes: N rows, C columns, F features.

    Args:
        statistics: Those of the data module, with ``columns``, ``numbers`` and ``categories``.
    """

    numbers: Tensor
    median: Tensor
    mean: Tensor
    std: Tensor
    categories: Tensor
    codes: Tensor
    order: Tensor

    def __init__(self, statistics: Mapping[str, Any]) -> None:
        super().__init__()
        columns, categories = statistics["columns"], statistics["categories"]
        owners = [index for index, column in enumerate(columns) for _ in categories.get(column, [None])]  # of features
        grouped = sorted(range(len(owners)), key=lambda feature: columns[owners[feature]] in categories)
        numbers = [index for index, column in enumerate(columns) if column not in categories]
        indices = {
            "numbers": numbers,
            "categories": [index for index in owners if columns[index] in categories],
            "codes": [code for column in columns for code in range(len(categories.get(column, ())))],
        }
        for name, values in indices.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.int64))
        facts = torch.tensor([statistics["numbers"][columns[index]] for index in numbers], dtype=torch.float64)
        for name, fact in zip(("median", "mean", "std"), facts.view(-1, 3).unbind(1), strict=True):
            self.register_buffer(name, fact.contiguous())
        self.columns = len(columns)
        self.register_buffer("order", torch.tensor(grouped, dtype=torch.int64).argsort())

    def forward(self, rows: Tensor) -> Tensor:
        """Map raw rows (N, C) to features (N, F), float32."""
        numbers = rows[:, self.numbers]
        numbers = torch.where(numbers.isfinite(), numbers, self.median)
        one_hot = rows[:, self.categories] == self.codes
        features = torch.cat([(numbers - self.mean) / self.std, one_hot.double()], dim=1)
        return features[:, self.order].float()

    def invert(self, features: Tensor) -> Tensor:
        """Map features (N, F) to raw rows (N, C)."""
        grouped = torch.empty(len(features), len(self.order), dtype=torch.float64)
        grouped[:, self.order] = features.double()
        rows = torch.full((len(features), self.columns), -1.0, dtype=torch.float64)
        count = len(self.numbers)
        rows[:, self.numbers] = grouped[:, :count] * self.std + self.mean
        for position, (column, code) in enumerate(zip(self.categories.tolist(), self.codes.tolist(), strict=True)):
            rows[grouped[:, count + position] > 0, column] = code
        return rows
