from pathlib import Path

from boltcutter.launch.job import Job, assignments, read_log


def test_runs_of_an_array_have_names_of_their_own() -> None:
    home = Path("/runs/digits/20261121-a1b2")
    assert Job("digits", home, Path("train.py")).runs == [home]
    array = Job("digits", home, Path("train.py"), tasks=2)
    assert array.runs == [home / "20261121-a1b2-0", home / "20261121-a1b2-1"]


def test_values_of_variables_are_quoted() -> None:
    assert assignments({"A": "b c", "N": "1"}) == ["export A='b c'", "export N=1"]


def test_a_log_is_read_to_its_end_and_no_line_twice(tmp_path: Path) -> None:
    file = tmp_path / "log"
    looks = iter((False, False, True))

    def over() -> bool:
        with file.open("a") as log:
            log.write("line\n")
        return next(looks)

    assert "".join(read_log(file, over)) == "line\n" * 3
    assert "".join(read_log(tmp_path / "none", lambda: True)) == ""
