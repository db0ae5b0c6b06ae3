import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import CONFIGS, Train

from boltcutter.cli import main

DIGITS = "data.shape=[3, 8, 8], data.outputs=10: digits have [1, 8, 8] and 10; leave both"


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        ("trainer.max_epoch=3", "trainer.max_epoch: Trainer takes no such argument; did you mean max_epochs?"),
        ("trainer.max_epochs=many", "trainer.max_epochs=many: expected Optional[int]"),
        ("trainer.max_epochs=1.5", "trainer.max_epochs=1.5: expected Optional[int]"),
        ("test=1", "test=1: expected bool"),
        ("seed=true", "seed=true: expected int"),
        ("trainer.precision=bf16-mixd", "trainer.precision=bf16-mixd: expected Union["),
        ("trainer=ddp trainer.strategy.find_unused=1", "trainer.strategy.find_unused: DDPStrategy takes no such"),
        ("~data.seed", "data.seed: missing; Digits needs it"),
        ("data.seed=???", "data.seed: not set; say data.seed=…"),
        ("model._target_=boltcutter.model.convnet.Convnet", "has no Convnet; did you mean ConvNet?"),
        ("model._target_=nowhere.Net", "model._target_: nowhere.Net cannot be imported (No module named 'nowhere')"),
        ("task.classes=${data.outputz}", "task.classes: Interpolation key 'data.outputz' not found; correct the ref"),
        ("optimizer=adamx", "optimizer=adamx: no such option; did you mean adamw? (there are: adamw)"),
        ("optimizer=3", "optimizer=3: no such option (there are: adamw)"),
        (
            "callback.best.monitor=val/acc",
            "monitor=val/acc: never logged (there are: train/loss, val/loss, val/accuracy)",
        ),
        ("trainer.devices=many", "trainer: `devices` selected with `CPUAccelerator` should be an int > 0."),
        ("seed=-1", "seed=-1 is not in [0, 4294967295]; try 0"),
        ("optimiser=adamw", "optimiser: no such key; did you mean optimizer?"),
        ("sed=3", "sed: no such key; did you mean seed?"),
        ("seed", "seed: cannot be read; say group=option, key=value, +key=value or ~key"),
        ("data.split=[0.5", "data.split: cannot read [0.5; quote the word for the shell, as in 'data.split=[1,2]'"),
        ("data.shape=[3,8,8]", DIGITS),
        ("data.batch_size=0", "data.batch_size=0 does not divide over 1 ranks; try 1"),
        ("data.batch_size=2000", "data.batch_size=2000: 1257 samples make no batch; give more, or lower it"),
        ("model.dropout=1", "model.dropout=1 is not in [0, 1); try 0.5"),
        ("optimizer.lr=-1", "Invalid learning rate: -1"),
        ("trainer=ddp trainer.devices=3", "data.batch_size=64 does not divide over 3 ranks; try 66"),
        ("resume=nowhere", "resume=nowhere: no run there (record.json is missing); give the folder of a run"),
        ("--chek", "--chek: no such flag; did you mean --check?"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    words: str, mistake: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        train(*words.split(" "), "--check")
    told = capsys.readouterr().err
    assert left.value.code == 2
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert mistake in told


def test_more_processes_than_the_trainer_uses(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        train("--check")
    assert "trainer.devices=1, trainer.num_nodes=1: 2 processes were started; say" in capsys.readouterr().err


def test_what_does_not_fit_a_run(train: Train, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, mistake in [
        (f"folder={whole}", f"folder={whole} holds a run; say resume={whole} to go on with it"),
        (f"resume={whole} seed=1", "data.seed=1: the run has had 0; set it back"),
        (f"resume={whole} data.batch_size=32", "data.batch_size=32: the run has had 64; set it back"),
    ]:
        with pytest.raises(SystemExit) as left:
            train(*words.split(), "--check")
        assert left.value.code == 2
        assert mistake in capsys.readouterr().err


@pytest.mark.parametrize("what", ["cut short", "a flipped byte", "code"])
def test_a_checkpoint_that_is_damaged_or_more_than_data_is_not_read(
    what: str, train: Train, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "record.json").write_bytes((whole / "record.json").read_bytes())
    last = tmp_path / "checkpoints" / "last.ckpt"
    content = bytearray((whole / "checkpoints" / "last.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content[:-100] if what == "cut short" else content)
    if what == "code":
        torch.save({"state_dict": print}, last)
    with pytest.raises(SystemExit) as left:
        train(f"resume={tmp_path}", "--check")
    assert left.value.code == 2
    assert f"{last}: no whole checkpoint of plain data (" in capsys.readouterr().err


def test_help_and_the_configuration_need_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    main(CONFIGS, "What it does.", ["--help"])
    told = capsys.readouterr().out
    assert told.startswith("What it does.\n")
    assert "logger=\n  csv             metrics.csv in the run's folder." in told
    main(CONFIGS, "", ["--print", "trainer=ddp", "callback=[default,early_stopping]", "data.split=[0.6,0.2,0.2]"])
    told = capsys.readouterr().out
    assert "name: digits-convnet" in told
    assert "patience: 5" in told
    code = "import sys, boltcutter.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.call([sys.executable, "-c", code]) == 0


def test_check_says_ok_and_leaves_nothing(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(f"runs={tmp_path}/runs", "--check")
    assert capsys.readouterr().out == "ok\n"
    assert not (tmp_path / "runs").exists()
