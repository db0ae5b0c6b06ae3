"""What only two ranks show is named, and correct programs of two ranks are not."""

import json
from pathlib import Path

import pytest
from conftest import ROOT, TORCHRUN, run_command

SCRIPT = '''
import json, sys
import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
sys.path.insert(0, "tests")
from programs import Base, digits
from boltcutter.diagnosis import Invariants


class Bypass(Base):
    """Gradients by hand, which DDP does not see."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        parameters = [*self.net.parameters()]
        for p, g in zip(parameters, torch.autograd.grad(self.loss(*batch), parameters)):
            p.grad = g
        self.optimizers().step()


class Reinitialized(Base):
    """Weights are drawn anew when DDP has copied them."""

    def on_train_start(self):
        torch.manual_seed(self.global_rank)
        nn.init.normal_(self.net[3].weight, std=0.1)


class OwnRates(Base):
    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = 0.01 * (1 + self.global_rank)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(digits(loaded=False)[0])


class Counter(Base):
    """The loader only counts updates."""

    def training_step(self, batch, batch_idx):
        return super().training_step((torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,))), batch_idx)

    def validation_step(self, batch, batch_idx):
        pass


train, val = digits()
found = {}
for name, module, loader in [
    ("correct", Base(), train),
    ("again", Base(), train),
    ("counter", Counter(), DataLoader(torch.zeros(320, 1), 8)),
    ("bypass", Bypass(), train),
    ("reinitialized", Reinitialized(), train),
    ("rates", OwnRates(), train),
    ("stream", Base(), DataLoader(Stream(), 32)),
]:
    watch = Invariants()
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False, callbacks=[watch], max_epochs=4)
    trainer.fit(module, loader, val)
    found[name] = sorted(f.check for f in watch.findings if f.level != "note")
if trainer.is_global_zero:
    open(sys.argv[1], "w").write(json.dumps(found))
'''


@pytest.mark.slow
def test_what_only_ranks_show_is_named(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(SCRIPT)
    environment = {"PYTHONPATH": f"{ROOT}/tests", "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, str(tmp_path / "ranks.py"), str(tmp_path / "found.json")]
    done = run_command(command, timeout=170, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {
        "correct": [],
        "again": [],
        "counter": [],
        "bypass": ["ranks-differ"],
        "reinitialized": ["ranks-differ"],
        "rates": ["ranks-differ", "ranks-rates"],
        "stream": ["ranks-same-data"],
    }
