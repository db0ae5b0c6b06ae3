import pytest
from conftest import Script


@pytest.mark.slow
def test_ratios_are_measured_in_one_run(script: Script) -> None:
    done = script("bench", "startup", "rounds=1", timeout=170)
    assert done.returncode == 0, done.stderr
    rows = {line[:32].strip(): line[32:].split() for line in done.stdout.splitlines()[2:]}
    assert rows["import lightning.pytorch"][1] == "1.00"
    assert float(rows["--help"][0]) < float(rows["--check"][0]) < float(rows["first training step"][0]) * 1.5
