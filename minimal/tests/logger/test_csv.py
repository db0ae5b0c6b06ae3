from pathlib import Path

from boltcutter.logger.csv import CSV


def test_a_resumed_run_replaces_the_steps_that_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.csv"
    first = CSV(str(path))
    for step in range(4):
        first.log_metrics({"loss": step / 3}, step)
    path.write_text(path.read_text()[:-5])  # a kill has cut it short
    again = CSV(str(path))
    again.log_metrics({"loss": 0.1, "epoch": 1}, 2)
    again.log_metrics({"loss": 0.2}, 3)
    rows = ["step,metric,value", "0,loss,0.0", f"1,loss,{1 / 3}", "2,loss,0.1", "2,epoch,1.0", "3,loss,0.2"]
    assert path.read_text().splitlines() == rows
