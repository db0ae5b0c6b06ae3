import json
from typing import Any

import lightning as L
import torch
from torch import nn

from boltcutter.diagnosis.source import depends_on_time, is_installed, is_mentioned, is_own_file


def use_outside(module: Any, x: Any) -> Any:
    return module.outside(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used_inside, self.forgotten = nn.Linear(1, 1), nn.Linear(1, 1)

    @torch.no_grad()
    def forward(self, x: Any) -> Any:
        return self.used_inside(x)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        self.outside, self.spare = nn.Linear(1, 1), nn.Linear(1, 1)
        self.net = nn.Sequential(nn.Linear(1, 1))

    def training_step(self, batch: Any) -> Any:
        return use_outside(self, self.net(self.blocks[0](batch))).sum()


class Timed(Module):
    def on_train_epoch_start(self) -> None:
        self.blocks.requires_grad_(self.current_epoch > 3)


def test_what_no_code_mentions_is_found() -> None:
    module = Module()
    unused = [name for name, _ in module.named_parameters() if not is_mentioned(module, name) and "weight" in name]
    assert unused == ["blocks.0.forgotten.weight", "spare.weight"]


def test_code_that_depends_on_time_is_found() -> None:
    assert depends_on_time(Timed())
    assert not depends_on_time(Module())


def test_parts_of_installed_packages_are_known() -> None:
    from transformers.activations import NewGELUActivation

    assert is_installed(NewGELUActivation())
    assert not any(map(is_installed, (Block(), nn.Linear(1, 1), Module())))


def test_a_file_is_the_users_wherever_it_lies() -> None:
    assert is_own_file(__file__)
    assert is_own_file("/home/me/boltcutter/src/mine.py")  # a clone is named like the library
    assert is_own_file("/usr/src/app/mine.py")  # where Python itself is below /usr
    found = (json.__file__, torch.__file__, is_mentioned.__code__.co_filename, "<stdin>", None)
    assert not any(map(is_own_file, found))
