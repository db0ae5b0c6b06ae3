import os
from pathlib import Path
from typing import Any

import pytest
import torch

from boltcutter.callback import transport
from boltcutter.config.settings import Settings

# Lines of NCCL's log: of 2.21 on two nodes, and of 2.4 with EFA.
PREFIX = "node-1:35637:35724 [0] NCCL INFO"


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))


@pytest.mark.parametrize(
    ("lines", "out", "err"),
    [
        (f"{PREFIX} NET/IB : No device found.\n{PREFIX} Using network Socket\n", "", "warning: NCCL communicates"),
        (f"{PREFIX} NET/IB : Using [0]mlx5_0:1/IB [RO]\n{PREFIX} Using network IB\n", "network        IB, by", ""),
        (f"{PREFIX} NET/OFI Selected Provider is efa\n{PREFIX} Using network AWS Libfabric\n", "AWS Libfabric, by", ""),
        (f"{PREFIX} NET/Socket : Using [0]ens3:172.31.12.210<0>\n", "", "by TCP; if they have InfiniBand or EFA, use"),
        (f"{PREFIX} comm 0x7f49f4008fb0 rank 1 nranks 2\n", "", ""),
    ],
)
@pytest.mark.usefixtures("two_nodes")
def test_the_network_between_nodes_is_told(lines: str, out: str, err: str, capsys: pytest.CaptureFixture[str]) -> None:
    (callback,) = transport.callbacks(Settings({}))
    file = Path(os.environ["NCCL_DEBUG_FILE"])
    file.write_text(lines)
    unused: Any = None
    callback.on_train_start(unused, unused)
    callback.on_train_start(unused, unused)  # the log is gone
    told = capsys.readouterr()
    assert not file.exists()
    for text, expected in ((told.out, out), (told.err, err)):
        assert (expected in text and text.count("\n") == 1) if expected else not text


@pytest.mark.parametrize(
    "variables",
    [{"LOCAL_WORLD_SIZE": "16"}, {"RANK": "1"}, {"NCCL_DEBUG": "WARN"}, {"CUDA": "none"}],
    ids=str,
)
@pytest.mark.usefixtures("two_nodes")
def test_nothing_is_logged_otherwise(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if "CUDA" in variables:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert transport.callbacks(Settings({})) == []
    assert "NCCL_DEBUG_FILE" not in os.environ
