import itertools
import json
import math
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from conftest import Script, environment
from forkserver import ForkServer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from boltcutter.task.language import BitsPerByte, LanguageModeling


class Counting(nn.Module):
    """Predicts that each token is followed by the next number, with some uncertainty."""

    context_length = 8

    def __init__(self) -> None:
        super().__init__()
        self.confidence = nn.Parameter(torch.tensor(3.0))

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.size(1) <= self.context_length
        return self.confidence * nn.functional.one_hot((tokens.long() + 1) % 10, 10)


class Cached(Counting):
    supports_cache = True

    def forward(self, tokens: Tensor, cache: list[Any] | None = None) -> Tensor:
        if cache is not None:
            cache[:] = [(cache[0] if cache else 0) + tokens.size(1)]
            assert cache[0] <= self.context_length
        return super().forward(tokens)


def task(model: nn.Module | None = None) -> LanguageModeling:
    return LanguageModeling(model or Counting(), optimizer=partial(torch.optim.SGD, lr=0.1))


def generate(model: nn.Module, count: int = 30, **settings: Any) -> list[int]:
    return list(task(model).generate(torch.tensor([3, 4]), count, **settings))


class Data(L.LightningDataModule):
    def __init__(self, token_bytes: list[int] | None = None) -> None:
        super().__init__()
        self.statistics = {} if token_bytes is None else {"token_bytes": token_bytes}
        torch.manual_seed(0)
        self.windows = [torch.randint(10, (3, 9), dtype=torch.uint8) for _ in range(4)]

    def test_dataloader(self) -> Any:
        return DataLoader([(window[:, :-1], window[:, 1:]) for window in self.windows], batch_size=None)

    val_dataloader = train_dataloader = test_dataloader


def measured(data: Data) -> dict[str, float]:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", devices=1, enable_checkpointing=False, **quiet)  # type: ignore[arg-type]
    return dict(trainer.test(task(), data, verbose=False)[0])


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning")
def test_bits_per_byte_and_perplexity() -> None:
    lengths = [0, *range(1, 10)]  # token 0 has no text
    data = Data(lengths)
    inputs, targets = (torch.cat(part).long() for part in zip(*data.test_dataloader(), strict=True))
    nats = -Counting()(inputs).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    found = measured(data)
    assert found["test/loss"] == pytest.approx(nats.mean().item(), rel=1e-5)
    assert found["test/perplexity"] == pytest.approx(math.exp(found["test/loss"]), rel=1e-5)
    counted = nats[targets > 0].sum().item() / math.log(2)
    assert found["test/bits_per_byte"] == pytest.approx(counted / targets.sum().item(), rel=1e-5)
    assert task().logged_metrics >= found.keys()
    assert "test/bits_per_byte" not in measured(Data())  # unknown number of bytes per token


TWO = """
import torch
from boltcutter.task.language import BitsPerByte
bits = BitsPerByte()
bits.token_bytes = torch.tensor([1, 3])
rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else None
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
bits.update(torch.full((1 + rank, 2), 0.5 + rank), torch.tensor([[0, rank]] * (1 + rank)))
nats, number = 2 * 0.5 + 4 * 1.5, 2 + 8
assert abs(float(bits.compute()) - nats / 0.6931471805599453 / number) < 1e-6, bits.compute()
print("exact")
"""


def test_bits_per_byte_over_ranks(two_ranks: Script) -> None:
    assert two_ranks(TWO).stdout.count("exact") == 2


@pytest.mark.parametrize("model", [Counting(), Cached()], ids=["plain", "cached"])
def test_greedy_generation_beyond_the_context_length(model: nn.Module) -> None:
    counted = [number % 10 for number in range(5, 35)]
    assert generate(model, temperature=0) == counted
    assert generate(model, top_k=1, temperature=5.0) == counted


def test_sampling_depends_on_seed_and_temperature() -> None:
    assert generate(Counting(), seed=1) == generate(Counting(), seed=1)
    assert generate(Counting(), seed=1) != generate(Counting(), seed=2)

    def wrong(temperature: float) -> int:
        drawn = [4, *generate(Counting(), 300, temperature=temperature)]
        return sum(b != (a + 1) % 10 for a, b in itertools.pairwise(drawn))

    assert wrong(0.2) < wrong(1.0) < wrong(5.0)


def test_bits_per_byte_without_token_bytes() -> None:
    bits = BitsPerByte()
    bits.update(torch.ones(1, 1), torch.zeros(1, 1))
    assert bits.token_bytes is None
    assert bits.bytes == 0


CORPUS = [
    "data=text",
    "model=gpt",
    "task=language",
    "logger=null",
    "report=false",
    "data.shape=[32]",
    "model.hidden_size=32",
]
CORPUS += [
    "data.batch_size=4",
    "trainer.max_epochs=3",
    "model.num_layers=1",
    "trainer.val_check_interval=0.5",
    "seed=3",
]


BPE = ["data.tokenizer=bpe", "data.vocab_size=300", "model.dropout=0.1"]


def overrides(tmp_path: Path, *more: str) -> list[str]:
    folder = tmp_path / "text"
    if not folder.exists():
        folder.mkdir()
        for number in range(30):
            (folder / f"{number}.txt").write_text(f"the number {number} comes before {number + 1}\n" * 5)
    return [*CORPUS, f"data.path={folder}", f"data.cache_dir={tmp_path}/cache", *more]


def weights(folder: Path) -> dict[str, Tensor]:
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return {name: value for name, value in state.items() if name.startswith("model.")}


@pytest.fixture(scope="module")
def completed(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language")
    done = script("train", *overrides(folder, *BPE, "report=true", f"folder={folder}/run"))
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return folder


def test_a_run_is_evaluated_and_reported(completed: Path) -> None:
    files = {path.name for path in (completed / "run" / "evaluation" / "test").iterdir()}
    assert files == {"metrics.json", "predictions.csv", "settings.json", "worst.npz"}
    header = (completed / "run" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train/loss", "val/loss", "val/bits_per_byte", "val/perplexity", "test/bits_per_byte"} <= set(header)
    report = (completed / "run" / "report.html").read_text()
    assert "comes before" in report  # in the sequences with the largest losses
    assert "is not there" not in report


def test_a_resumed_run_is_bitwise_identical(forks: ForkServer, script: Script, completed: Path, tmp_path: Path) -> None:
    argv = ["scripts/train.py", *overrides(completed, *BPE, f"folder={tmp_path}/run")]
    with open(os.devnull, "wb") as nothing, forks.start(argv, environment(), nothing.fileno(), 2) as process:
        end = time.monotonic() + 60
        while not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert process.returncode == 128 + signal.SIGTERM
    shutil.rmtree(completed / "cache")  # resume on a machine without the cache
    resumed = script("train", f"resume={tmp_path}/run")
    assert resumed.returncode == 0, resumed.stderr
    expected, resumed_weights = weights(completed / "run"), weights(tmp_path / "run")
    assert all(torch.equal(expected[name], resumed_weights[name]) for name in expected)


@pytest.mark.slow
def test_two_processes_equal_one(script: Script, tmp_path: Path) -> None:
    two = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    for name, more in (("one", ["trainer.accelerator=cpu"]), ("two", two)):
        done = script(
            "train", *overrides(tmp_path, f"folder={tmp_path}/{name}", *more), ranks=2 if name == "two" else 0
        )
        assert done.returncode == 0, done.stderr
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all((one[name] - two[name]).abs().max() < 1e-5 for name in one)
    metrics = [json.loads((tmp_path / n / "evaluation" / "test" / "metrics.json").read_text()) for n in ("one", "two")]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5)


@pytest.mark.slow
def test_generation_by_predict(script: Script, completed: Path) -> None:
    def generate(*more: str) -> str:
        done = script("predict", f"run={completed}/run", "input=the number", "tokens=40", *more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert generate() == generate()
    assert generate().startswith("the number")
    assert generate("seed=1") != generate()
    (completed / "prompt.txt").write_text("comes before")
    assert generate(f"input={completed}/prompt.txt", "temperature=0").startswith("comes before")


@pytest.mark.slow
def test_gpt_124m_trains_one_step_with_a_smaller_size(script: Script, tmp_path: Path) -> None:
    small = [
        "model.num_layers=1",
        "model.hidden_size=48",
        "data.shape=[16]",
        "data.vocab_size=300",
        "data.batch_size=2",
    ]
    short = ["trainer.max_steps=1", "trainer.accumulate_grad_batches=1", "task.compile=false", "trainer.devices=1"]
    own = [
        override for override in overrides(tmp_path) if override.startswith(("data.path", "data.cache", "logger", "~"))
    ]
    done = script("train", "experiment=gpt_124m", *own, *small, *short, "report=false", f"folder={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["global_step"] == 1
    assert script("check", "experiment=gpt_124m").stdout == "ok\n"
    assert script("check", "experiment=gpt_small").stdout == "ok\n"
