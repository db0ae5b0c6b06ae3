import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import scale
from benchmarks.harness import BenchmarkError
from benchmarks.scale import Cost, Work


@pytest.mark.parametrize(
    ("cost", "expected"),
    [(lambda n: 5, 0), (lambda n: 5 + n, 1), (lambda n: 5 + n * n, 2), (lambda n: 5 + n**0.5, 0.5)],
    ids=["constant", "linear", "square", "root"],
)
def test_the_exponent_is_that_of_the_growth(cost: Callable[[int], float], expected: float) -> None:
    sizes = (1, 1_000, 1_000_000)
    costs = [Cost(cpu=cost(size), duration=0, mib=100 * cost(size)) for size in sizes]
    assert scale.exponents(sizes, costs) == pytest.approx((expected, expected), abs=0.02)


def test_noise_is_no_growth() -> None:
    assert scale.exponents((1, 10, 100), [Cost(5, 5, 500), Cost(4.9, 5, 501), Cost(5.4, 5, 510)]) == (0, 0)


@pytest.mark.slow
def test_memory_and_time_of_processes_are_measured() -> None:
    large, busy = ["-c", "b'1' * (2 << 30)"], ["-c", "while __import__('time').process_time() < 1: 0"]
    cost = scale.execute([(large, {}), (busy, {})])
    assert 2048 < cost.mib < 2200
    assert 1 < cost.cpu < 10
    with pytest.raises(BenchmarkError, match="ended with 3: no"):
        scale.execute([(["-c", "import sys; print('no', file=sys.stderr); sys.exit(3)"], {})])
    with pytest.raises(BenchmarkError, match=r"work=sample: unknown; choose from: samples, tokens"):
        scale.main(Path(), ["work=sample"])  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("name", scale.WORKS)
def test_each_work_is_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work: Work = scale.WORKS[name]
    sizes = {"ranks": (1, 2), "fake_ranks": (8, 16), "tokens": (10_000, 20_000)}.get(name, (100, 200))
    monkeypatch.setitem(scale.WORKS, name, replace(work, sizes=sizes))
    scale.main(Path(), [f"work={name}", f"folder={tmp_path}"])  # type: ignore[arg-type]
    found = json.loads((tmp_path / "scale.json").read_text())[name]
    assert list(found["sizes"]) == [str(size) for size in sizes]
    assert all(cost["cpu"] > 0 and cost["mib"] > 0 for cost in found["sizes"].values())
    assert f"{name:12} exponent" in capsys.readouterr().out
