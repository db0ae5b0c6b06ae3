"""All programs with a planted bug are named, no correct one is; and looking changes nothing."""

import copy
import pickle
import pkgutil
import re
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import pytest
import torch
from programs import BUGS, CORRECT, Base, Program, digits
from programs.running import QUICK, assert_named, bugs_of, cases, find, trainer_of
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from boltcutter import diagnosis
from boltcutter.diagnosis import CHECKS, Evidence, Finding, FindingError, Invariants, check
from boltcutter.diagnosis.evidence import Steps
from boltcutter.diagnosis.invariants import StepHook, next_look
from boltcutter.run.folder import read_record


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", cases(CORRECT))
def test_a_correct_program_is_not(program: Program, tmp_path: Path) -> None:
    assert not [f for f in find(program, tmp_path) if f.level != "note"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", bugs_of("nothing"))
def test_a_training_of_nothing_is_named(program: Program, tmp_path: Path) -> None:
    assert_named(program, tmp_path)


def test_all_programs_are_there() -> None:
    assert BUGS.keys() | CORRECT.keys() >= QUICK
    assert len(BUGS) >= 71
    assert len(CORRECT) >= 140


class Noisy(Base):
    """Has dropout, BatchNorm, a schedule, and a layer without a gradient, so that hooks of layers are set, too."""

    def network(self) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10)
        )

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Linear(10, 10)

    def loss(self, x: Any, y: Any) -> Any:
        out = self(x + torch.randn_like(x) * 0.1)
        return F.cross_entropy(out + self.cut(out).detach(), y)


def train_noisily(folder: Path, *callbacks: Any, **options: Any) -> tuple[dict[str, Any], Any, L.Trainer]:
    L.seed_everything(0, verbose=False)
    module, (train, val) = Noisy(), digits(320, 64)
    trainer = trainer_of(folder, *callbacks, max_epochs=2, **options)
    trainer.fit(module, train, val)
    return module.state_dict(), torch.get_rng_state(), trainer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}], ids=str)
def test_weights_and_random_numbers_are_the_same_bit_by_bit(options: dict[str, Any], tmp_path: Path) -> None:
    watch = Invariants()
    plain, state, _ = train_noisily(tmp_path, **options)
    watched, same, trainer = train_noisily(tmp_path, watch, **options)
    assert [f.check for f in watch.findings if f.level == "likely"] == ["cut-gradient"]
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    assert torch.equal(state, same)
    # Nothing stays on the objects of the user and of Lightning.
    assert not {"training_step", "validation_step"} & vars(trainer.strategy).keys()
    assert "backward" not in vars(trainer.precision_plugin)
    assert not any(m._forward_hooks for m in trainer.lightning_module.modules())
    assert not trainer.optimizers[0]._optimizer_step_post_hooks


@pytest.mark.filterwarnings("ignore")
def test_it_stores_nothing_in_checkpoints_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    results = []
    for watched in (False, True):
        callbacks = [Invariants()] if watched else []
        _, _, first = train_noisily(tmp_path, *callbacks, max_steps=7)
        first.save_checkpoint(file := tmp_path / "a.ckpt")
        assert "Invariants" not in str(torch.load(file, weights_only=False)["callbacks"])
        L.seed_everything(1, verbose=False)
        module, (train, val) = Noisy(), digits(320, 64)
        trainer_of(tmp_path, *callbacks, max_epochs=3).fit(module, train, val, ckpt_path=file)
        results.append(module.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


class Copier(L.Callback):
    """Copies and pickles all that users do, at each step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for each in (copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))):
            assert not any(m._forward_hooks and "ForwardHook" not in str(m._forward_hooks) for m in each.modules())
            each.net(torch.zeros(2, 1, 8, 8))
        pickle.loads(pickle.dumps(trainer.optimizers[0]))
        pickle.loads(pickle.dumps([c for c in trainer.callbacks if isinstance(c, Invariants)]))


@pytest.mark.filterwarnings("ignore")
def test_modules_optimizers_and_callbacks_are_copied_while_they_train(tmp_path: Path) -> None:
    watch = Invariants()
    train_noisily(tmp_path, watch, Copier())
    assert "cut-gradient" in {f.check for f in watch.findings}


@pytest.mark.filterwarnings("ignore")
def test_a_check_may_be_ignored_or_an_error(tmp_path: Path) -> None:
    program = BUGS["softmax_permuted"]
    module, train, val = program.make()
    ignoring = Invariants(ignore=["double-softmax"])
    trainer_of(tmp_path, ignoring, max_epochs=1).fit(module, train, val)
    assert not ignoring.findings
    module, train, val = program.make()
    with pytest.raises(FindingError, match="double-softmax"):
        trainer_of(tmp_path, Invariants(on_finding="error")).fit(module, train, val)
    with pytest.raises(ValueError, match=r"callback\.invariants\.ignore=nothing"):
        Invariants(ignore=["nothing"])
    with pytest.raises(ValueError, match=r"callback\.invariants\.on_finding=stop"):
        Invariants(on_finding="stop")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_findings_stand_in_the_record_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # as a resumed run
        module, train, val = BUGS["nll_of_logits"].make()
        trainer_of(tmp_path, Invariants(folder=tmp_path), max_epochs=1).fit(module, train, val)
    (finding,) = read_record(tmp_path)["findings"]
    assert finding["check"] == "not-log"
    assert finding["level"] == "certain"
    assert capfd.readouterr().err.count("warning: not-log (certain)") == 2


@pytest.mark.filterwarnings("ignore")
def test_a_check_of_the_user_is_asked_and_one_that_fails_ends_nothing(
    tmp_path: Path,
) -> None:
    before = dict(CHECKS)

    @check("large-batch", "likely", at="batch")
    def large_batch(seen: Evidence) -> Any:
        """More than 10 samples."""
        if seen.batch_size > 10:
            yield f"{seen.batch_size} samples"

    @check("broken", "certain", at="step")
    def broken(seen: Evidence) -> Any:
        """Fails."""
        yield str(1 / 0)

    watch = Invariants(folder=tmp_path)
    assert CHECKS["large-batch"][0].rule == "More than 10 samples."
    trainer = trainer_of(tmp_path, watch, max_epochs=1)
    try:
        trainer.fit(Base(), *digits(64, 32))
    finally:
        for name in CHECKS.keys() - before.keys():
            del CHECKS[name]
    assert trainer.global_step == 2
    assert [(f.check, f.level) for f in watch.findings] == [("large-batch", "likely"), ("broken", "note")]
    assert [each["check"] for each in read_record(tmp_path)["findings"]] == ["large-batch", "broken"]


def test_it_looks_at_few_steps() -> None:
    steps, step = [], 0
    while step < 10_000:
        step = next_look(step, 10_000)
        steps.append(step)
    assert steps[:-1] == [1, 2, 4, 8, 32, 128, 512, 2048, 8192]
    assert steps[-1] > 10_000  # as a step of the second half was looked at
    assert next_look(512, 1_100) == 1_100
    assert next_look(128, 300) == 300
    assert next_look(512, 900) == 900
    assert next_look(9, 20) == 20  # after a follow-up
    assert [next_look(step, 100, first=8) for step in (1, 7, 8)] == [2, 8, 32]  # of a trial


def test_between_looks_a_step_costs_less_than_a_microsecond() -> None:
    watch = Invariants()
    watch._next = 1 << 60
    hook, times = StepHook(watch, Steps()), []
    for _ in range(200):
        began = perf_counter()
        for _ in range(100):
            hook(None, (), {})
        times.append((perf_counter() - began) * 1e4)  # microseconds a step
    assert min(times) < 1


class Operations(TorchDispatchMode):
    """Counts the operations of torch, among them those that wait for a device: .item(), bool(), .cpu()."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(operation)] += 1
        return operation(*args, **(kwargs or {}))


class CountOperations(L.Callback):
    """Counts those of each step."""

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.mode = Operations()
        self.mode.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.mode.__exit__(None, None, None)
        self.steps.append(self.mode.counts)


@pytest.mark.filterwarnings("ignore")
def test_between_looks_no_operation_of_torch_is_called_and_no_device_is_waited_for(tmp_path: Path) -> None:
    plain, watched = CountOperations(), CountOperations()
    trainer_of(tmp_path, plain, max_steps=12).fit(Base(), *digits(64, 32, batch=16))
    trainer_of(tmp_path, Invariants(), watched, max_steps=12).fit(Base(), *digits(64, 32, batch=16))
    differ = [step for step, pair in enumerate(zip(plain.steps, watched.steps, strict=True), 1) if pair[0] != pair[1]]
    assert differ == [1, 2, 4, 8, 12]
    assert watched.steps[0]["aten._local_scalar_dense.default"] > 0  # so that waiting would be seen


@pytest.mark.filterwarnings("ignore")
def test_looks_compile_nothing_again(tmp_path: Path) -> None:
    counts = []
    for callbacks in ([], [Invariants()]):
        torch._dynamo.reset()
        counter = CompileCounter()
        module = Base()
        module.net = torch.compile(module.net, backend=counter)
        trainer_of(tmp_path, *callbacks, max_steps=6).fit(module, *digits(64, 32, batch=16))
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] > 0


@pytest.mark.filterwarnings("ignore")
def test_a_module_that_steps_by_itself_is_left_alone_after_a_while(tmp_path: Path) -> None:
    class Own(Base):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.own = torch.optim.SGD(self.parameters(), 0.1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.own.zero_grad()
            self.loss(*batch).backward()
            self.own.step()

    watch = Invariants()
    trainer = trainer_of(tmp_path, watch, max_epochs=8)
    trainer.fit(Own(), *digits(640, 32, batch=64))
    assert not [f for f in watch.findings if f.level != "note"]
    assert "training_step" not in vars(trainer.strategy)


def test_findings_are_text_of_one_line() -> None:
    assert "\n" not in str(Finding("a", "likely", "b", 3))
    assert all(group[0].rule for group in CHECKS.values())


def test_the_documentation_lists_each_check_and_its_rule() -> None:
    text = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text()
    for module in pkgutil.iter_modules(diagnosis.__path__, "boltcutter.diagnosis."):
        import_module(module.name)  # of audit, too
    for each in (each for group in CHECKS.values() for each in group):
        lines = [line for line in text.splitlines() if line.startswith(f"| `{each.name}` | {each.level} |")]
        assert [line for line in lines if line.endswith(f"| {each.rule.replace('``', '`')} |")], each.name
    named = set(re.findall(r"^\| `([\w-]+)` \| (?:certain|likely|note) \|", text, re.M))
    assert named == {each.name for group in CHECKS.values() for each in group}


@pytest.mark.filterwarnings("ignore")
def test_a_copy_looks_when_it_is_trained_itself_as_in_a_process_that_was_spawned(tmp_path: Path) -> None:
    watch = pickle.loads(pickle.dumps(Invariants(ignore=["no-gradient"])))
    assert_named(BUGS["leaf_loss"], tmp_path, watch)
    assert watch.findings


PACKAGED = """
from programs import Base
from torch import nn

class Packaged(Base):
    def __init__(self):
        super().__init__()
        self.projector = nn.Linear(10, 4)
"""


def test_what_an_author_left_in_a_package_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "site-packages").mkdir()
    for file, place in (("packaged", folder), ("of_user", tmp_path)):
        (place / f"{file}.py").write_text(PACKAGED)
        monkeypatch.syspath_prepend(place)
        program = Program(file, partial(_packaged, file))
        levels = {f.level for f in find(program, tmp_path) if f.check == "unused-parameter"}
        assert levels == {"note" if file == "packaged" else "likely"}


def _packaged(file: str, part: nn.Module | None = None) -> Any:
    module = import_module(file).Packaged()
    module.net = part or module.net
    return module, *digits()


class OwnNetwork(nn.Sequential):
    """A network of the user's within a module of a package."""


def test_what_a_user_gives_to_a_package_is_no_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "site-packages").mkdir()
    (folder / "packaged_with_part.py").write_text(PACKAGED)
    monkeypatch.syspath_prepend(folder)
    own = OwnNetwork(nn.Flatten(), nn.Linear(64, 10))
    program = Program("with_part", partial(_packaged, "packaged_with_part", own))
    assert {f.level for f in find(program, tmp_path) if f.check == "unused-parameter"} == {"likely"}
