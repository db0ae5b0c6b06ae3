"""Planted bugs that only probes and data show are named, no correct program is, and a trial changes nothing."""

from pathlib import Path
from time import monotonic
from typing import Any

import lightning as L
import pytest
import torch
from programs import BUGS, CORRECT, Base, Program, digits
from programs.running import assert_named, bugs_of, find, is_probed, modules_of, trainer_of
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from boltcutter.diagnosis import CHECKS
from boltcutter.diagnosis.checks import Lines, check
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.probe import MOST_PASSES
from boltcutter.diagnosis.trial import Trial

# Correct programs that are nearest to an alarm of a probe.
NEAR = {"variable_length", "q_learning", "metric_learning", "gan", "ragged_lists"}


def near(programs: dict[str, Program]) -> list[Any]:
    """The programs, most of which are slow together."""
    return [pytest.param(p, id=n, marks=() if n in NEAR else pytest.mark.slow) for n, p in programs.items()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", near(CORRECT))
def test_a_correct_program_is_not(program: Program, tmp_path: Path) -> None:
    assert not [f for f in find(program, tmp_path, Trial(with_data=True)) if f.level != "note"]


OTHERS = (
    "arguments",
    "baselines",
    "called",
    "flows",
    "gradients",
    "layers",
    "leaks",
    "losses",
    "rates",
    "relations",
    "reruns",
    "rows",
    "unread",
)  # without tests of their own


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", [case for module in OTHERS for case in bugs_of(module, probed=True)])
def test_a_planted_bug_is_named(program: Program, tmp_path: Path) -> None:
    assert_named(program, tmp_path, Trial(with_data=True))


def test_each_planted_bug_has_a_test() -> None:
    texts = {file.stem.removeprefix("test_"): file.read_text() for file in Path(__file__).parent.glob("test_*.py")}
    probed = {*OTHERS, *(name for name, text in texts.items() if f'bugs_of("{name}", probed=True)' in text)}
    plain = {name for name in texts if any(f'bugs_of("{name}")' in text for text in texts.values())}
    assert not [n for n, p in BUGS.items() if not modules_of(p) & (probed if is_probed(p) else plain)]


class Stateful(Base):
    """Counts, keeps outputs, has metrics, statistics and a random generator."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(10)
        self.outputs: list[Any] = []
        self.counts = {"steps": 0}
        self.generator = torch.Generator().manual_seed(1)
        self.schedule_steps = 0

    def network(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(), nn.Linear(32, 10))

    def loss(self, x: Any, y: Any) -> Any:
        self.counts["steps"] += 1
        self.outputs.append(out := self(x + torch.randn(x.shape, generator=self.generator) + torch.randn_like(x)))
        self.accuracy.update(out, y)
        return F.cross_entropy(out, y)

    def state(self) -> list[Any]:
        tensors = [t.clone() for t in (*self.state_dict().values(), self.accuracy.tp, self.generator.get_state())]
        return [*tensors, len(self.outputs), self.counts["steps"], self.accuracy._update_count]


class Compares(Trial):
    """Compares the states before and after the probes."""

    before: Any
    after: Any
    passes = 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        def state() -> list[Any]:
            return [*pl_module.state(), torch.get_rng_state(), *(t.clone() for t in batch), trainer.global_step]

        if not batch_idx:
            self.before = state()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if not batch_idx:
            self.after, self.passes = state(), self._seen.probe.passes  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore")
def test_probes_change_nothing(tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    module, trial = Stateful(), Compares()
    trainer = trainer_of(tmp_path, trial)
    trainer.fit(module, *digits(320, 64))
    assert 5 < trial.passes <= MOST_PASSES
    for before, after in zip(trial.before, trial.after, strict=True):
        assert torch.equal(torch.as_tensor(before), torch.as_tensor(after))
    assert trainer.global_step == 8


@pytest.mark.filterwarnings("ignore")
def test_a_trial_ends_when_its_time_is_over(tmp_path: Path) -> None:
    trial = Trial(seconds=0)
    trainer = trainer_of(tmp_path, trial)
    trainer.fit(Base(), *digits(320, 64))
    assert trainer.global_step == 1
    assert {f.level for f in trial.findings} == {"note"}


def test_no_further_check_is_asked_when_time_is_out(tmp_path: Path) -> None:
    asked: list[str] = []

    @check("slow-check", "note", at="probe")
    def slow(seen: Evidence) -> Lines:
        """Never."""
        asked.append("slow")
        assert monotonic() < trial._until < monotonic() + 60
        trial._until = 0.0  # as if this one took too long
        yield from ()

    @check("check-behind", "note", at="probe")
    def behind(seen: Evidence) -> Lines:
        """Never."""
        asked.append("behind")
        yield from ()

    try:
        trial = Trial(seconds=20)
        trial._checks["probe"] = [*CHECKS["slow-check"], *CHECKS["check-behind"]]
        trainer_of(tmp_path, trial).fit(Base(), *digits())
    finally:
        del CHECKS["slow-check"], CHECKS["check-behind"]
    assert asked == ["slow"]
    assert any("check-behind and checks behind it were not asked" in finding.text for finding in trial.findings)
