from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from boltcutter.config.compose import DictConfig, compose, merge
from boltcutter.config.targets import keeps_arguments, same_target
from boltcutter.project import Project

PROJECT = Project.find(__file__)
DEFAULT = "lightning.pytorch.Trainer"


class OwnTrainer(Trainer):
    """A trainer of a project."""


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (DEFAULT, "lightning.pytorch.trainer.Trainer", True),
        (DEFAULT, "lightning.Trainer", True),
        (DEFAULT, "lightning.pytorch.trainer.trainer.Trainer", True),
        ("torch.optim.AdamW", "torch.optim.adamw.AdamW", True),
        ("torch.optim.AdamW", "torch.optim.Adam", False),
        ("lightning.pytorch.callbacks.ModelCheckpoint", "nowhere.ModelCheckpoint", False),
        ("boltcutter.strategy.ddp.DDPStrategy", "lightning.pytorch.strategies.DDPStrategy", False),
    ],
)
def test_targets_are_compared_as_classes(one: str, other: str, expected: bool) -> None:
    assert same_target(one, other) == same_target(other, one) == expected


def test_subclasses_of_the_trainer_take_its_arguments() -> None:
    assert keeps_arguments(DEFAULT, f"{__name__}.OwnTrainer")
    assert not keeps_arguments("torch.optim.Adam", "torch.optim.AdamW")  # a subclass, with other defaults
    assert not keeps_arguments(DEFAULT, "torch.nn.Linear")
    assert not keeps_arguments(None, DEFAULT)


@pytest.mark.parametrize("target", ["lightning.pytorch.trainer.Trainer", "lightning.Trainer", f"{__name__}.OwnTrainer"])
def test_defaults_stay_with_another_spelling(target: str, tmp_path: Path) -> None:
    option = tmp_path / "mine.yaml"
    option.write_text(f"defaults: default\n_target_: {target}\nmax_epochs: 3\n")
    experiment = tmp_path / "own.yaml"
    experiment.write_text(f"trainer:\n  _target_: {target}\n  max_epochs: 3\n")
    for overrides in ([f"trainer={option}"], [f"experiment={experiment}"], [f"trainer._target_={target}"]):
        trainer = compose(PROJECT, overrides).trainer
        assert trainer._target_ == target
        assert trainer.plugins[0]._target_ == "boltcutter.checkpoint.io.AtomicCheckpointIO"
        assert trainer.gradient_clip_val == 1.0


def test_another_class_drops_the_arguments() -> None:
    adam = DictConfig({"_target_": "torch.optim.Adam", "_partial_": True, "lr": 1})
    assert merge(adam, DictConfig({"_target_": "torch.optim.SGD"})) == {
        "_target_": "torch.optim.SGD",
        "_partial_": True,
    }
    assert merge(adam, DictConfig({"_target_": "torch.optim.adam.Adam"})).lr == 1
