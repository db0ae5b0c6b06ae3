"""What the cells of a table are is decided once, and in the same way for each file."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from boltcutter.data.table import decide_types, read_table
from boltcutter.data.tabular import Tabular


def all_inputs(data: Tabular) -> torch.Tensor:
    data.setup("fit")
    assert data.splits is not None
    return torch.cat([split.inputs for split in data.splits])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("cells", "features", "said"),
    [
        (["1", "2.5", "-3e2", " 4 "], 1, "number"),
        (["1", "2", "1_000", "3"], r"has '1_000', which is no number, unlike most", ""),
        (["NA", "None", "nan", "null"], 4, "text, 4 different"),
        (["NA", "DE", "", "FR"], 3, "text, 3 different; 1 missing"),
        (["1.5", "NA", "", "2"], r"has 20 missing or infinite values", ""),
        (["1", "1e400", "2", "3"], r"has (10 missing or infinite values|'1e400')", ""),
        (["TRUE", "FALSE", "TRUE", "FALSE"], 1, "number, 1 for true and 0 for false"),
        (["TRUE", "FALSE", "", "FALSE"], 2, "text, as it has true, false; 1 missing"),
        (["01234", "1234", "00077", "77"], 4, "text, as '01234', '00077' begin with zeros"),
        (["0", "0.5", "0.25", "1"], 1, "number"),
        (['"1,5"', '"2,5"', '"-3,0"', '"4"'], r"has '1,5', '2,5', '-3,0', .* data.decimal=','", ""),
        (['"1,234"', '"2,500"', "7", "8"], r"has '1,234', '2,500', which is no number in a form", ""),
        (["5%", "6%", "7.5%", "8"], r"has '5%', '6%', '7.5%', which", ""),
        (["\u22125", "\u20136", "7", "8"], r"has '\u22125', '\u20136', which is no number in a form", ""),
        (
            ["1\u202f000", "2\u202f000", "7", "8"],
            r"has .1.u202f000., .2.u202f000., which is no number in a form that is read",
            "",
        ),
        (["9007199254740992", "9007199254740993", "1", "2"], r"has 9007199254740992 and 9007199254740993, which", ""),
        (["9007199254740992", "9007199254740994", "1", "2"], 1, "number"),
        (["1e300", "-1e300", "1", "2"], r"has numbers from -1e.300 to 1e.300, whose standard deviation", ""),
        (["$5", "$6", "$7", "$8"], r"has '\$5', '\$6', '\$7' .*, which", ""),
        (["1", "2", "3", "x"], r"column a has 'x', which is no number, unlike most .* data.columns='{a: text}'", ""),
        (["1", "?", "3", "-"], r"has 20 missing or infinite values", ""),
        (["10-19", "20-29", "30-39", "40+"], 4, "text, 4 different"),
        (["", "", "", ""], r"column a has no values; set data.ignore=\[a\]", ""),
    ],
)
def test_what_a_column_is_is_decided_once(tmp_path: Path, cells: list[str], features: int | str, said: str) -> None:
    lines = [f"{cell},{row}.5,{row % 7}.5" for row, cell in enumerate(cells * 10)]
    (tmp_path / "a.csv").write_text("\n".join(["a,x,y", *lines]))
    data = Tabular(path=tmp_path / "a.csv", target="y")
    if isinstance(features, str):
        with pytest.raises(
            ValueError, match=f"^data.path=.*a.csv: column a {features.removeprefix('column a ')}"
        ) as error:
            data.setup("fit")
        assert "\n" not in str(error.value)
        return
    assert data.infer_settings()["shape"] == [features + 1]
    said = said.replace("1 missing", "10 missing")
    assert data.read_as == [f"a: {said}", "x: number", "y: number; target of regression"]
    inputs = all_inputs(data)
    assert torch.isfinite(inputs).all()
    # Each row alone, as a new file, is read in the same way.
    whole, _ = data.read([tmp_path / "a.csv"])
    for row in range(len(cells)):
        (tmp_path / "new.csv").write_text(f"a,x\n{lines[row].rpartition(',')[0]}\n")
        assert torch.equal(data.read([tmp_path / "new.csv"])[0][0], whole[row])


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("utf-8 with its mark", "\ufeffcity;x;y\n".encode() + "M\u00fcnchen;1.5;2\nRom;2.5;3.5\n".encode() * 20, {}),
        ("utf-16", ("city\tx\ty\n" + "M\u00fcnchen\t1.5\t2\nRom\t2.5\t3.5\n" * 20).encode("utf-16"), {}),
        (
            "latin-1",
            ("city|x|y\n" + "M\u00fcnchen|1.5|2\nRom|2.5|3.5\n" * 20).encode("latin-1"),
            {"encoding": "latin-1"},
        ),
        ("decimal commas", ("city;x;y\n" + "M\u00fcnchen;1,5;2\nRom;2,5;3,5\n" * 20).encode(), {"decimal": ","}),
        ("separators at the end", ("city,x,y,\n" + "M\u00fcnchen,1.5,2,\nRom,2.5,3.5,\n" * 20).encode(), {}),
        (
            "a line for Excel",
            ("sep=;\r\n" + "city;x;y\r\n" + "M\u00fcnchen;1.5;2\r\nRom;2.5;3.5\r\n" * 20).encode(),
            {},
        ),
        ("utf-32", ("city,x,y\n" + "M\u00fcnchen,1.5,2\nRom,2.5,3.5\n" * 20).encode("utf-32"), {}),
        ("quotes", ('"city" , "x",y\n' + '"M\u00fcnchen",1.5,2\n"Rom","2.5",3.5\n' * 20).encode(), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_csv_files_of_other_programs_give_the_same_table(
    tmp_path: Path, name: str, content: bytes, options: dict[str, Any]
) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    (tmp_path / "plain.csv").write_text("city,x,y\n" + "M\u00fcnchen,1.5,2\nRom,2.5,3.5\n" * 20)
    data = Tabular(path=tmp_path / "a.csv", target="y", **options)
    assert data.fingerprint() == Tabular(path=tmp_path / "plain.csv", target="y").fingerprint(), name
    assert data.statistics["categories"] == {"city": ["M\u00fcnchen", "Rom"]}


def test_a_cell_with_separators_and_lines_is_one_cell(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("c,x,y\n" + '"a, b\nc",1,2.5\nd,2,3.5\n' * 20)
    data = Tabular(path=tmp_path / "a.csv", target="y")
    data.setup("fit")
    assert data.statistics["categories"] == {"c": ["a, b\nc", "d"]}


@pytest.mark.parametrize(("first", "name"), [(0, ""), (1, ""), (0, "Unnamed: 0")])
def test_row_numbers_without_a_name_are_left_out(tmp_path: Path, first: int, name: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"{name},x\n" + "".join(f"{first + row},{row / 2}\n" for row in range(9)))
    with pytest.warns(UserWarning, match="first column has no name and numbers the rows, so it is left out"):
        assert [*read_table(path)] == ["x"]
    shuffled = path.read_text().splitlines()
    path.write_text("\n".join([shuffled[0], *reversed(shuffled[1:])]))
    with pytest.warns(UserWarning, match="numbers the rows, so it is left out"):
        assert [*read_table(path)] == ["x"]
    path.write_text("\n".join(f"{'Unnamed: 0.1' if row == 0 else row},{line}" for row, line in enumerate(shuffled)))
    with pytest.warns(UserWarning, match="numbers the rows, so it is left out"):
        assert [*read_table(path)] == ["x"]  # written twice
    path.write_text("\n".join(shuffled) + "\n")
    path.write_text(path.read_text().replace("5,", "7,", 1))
    assert [*read_table(path)] == [name, "x"]


@pytest.mark.parametrize(
    ("cells", "is_number"),
    [
        (["1.5 kg", "2 kg", "12 kg", "7.25 kg"], True),
        (["EUR 5", "EUR 7", "EUR 1,200", "EUR 3"], True),
        (["1 star", "2 stars", "3 stars", "4 stars", "5 stars"], False),
        (["12A", "7B", "3C", "9D", "1E"], False),
        (["room 1", "room 2", "room 3", "room 4"], False),
        (["'1.5'", "'2'", "'3'", "'4'"], True),
        (['="1"', '="2"', '="3.5"', '="4"'], True),
        (["1\u200b", "2\u200b", "3.5\u200b", "4\u200b"], True),
        (["0x1F", "0x2A", "0xff", "0x10"], True),
        (["1.5\u00d710^3", "2 x 10^4", "3\u00d710^2", "4*10^-2"], True),
        (["1.5D+03", "2.0D+04", "3.0D-02", "4.0D+00"], True),
        (["1h30m", "2h", "45m", "1h 5min"], True),
        (["PT5M", "PT1H30M", "P2DT3H", "PT7S"], True),
        (["2 days", "3 days", "10 weeks", "1 month"], True),
        (["5 kg", "6 lb", "7.5 kg", "8 lbs"], True),
        (["10K", "2M", "512k", "1.5G"], True),
        (["[1, 2]", "[2, 3]", "[3, 4]", "[4, 5]"], False),
        (["1st", "2nd", "3rd", "4th"], False),
    ],
)
def test_numbers_in_another_notation_are_no_categories(tmp_path: Path, cells: list[str], is_number: bool) -> None:
    table = pd.DataFrame({"size": cells})
    if is_number:
        with pytest.raises(ValueError, match=r"column size has .* which is no number in a form that is read"):
            decide_types(table, {}, "t")
    else:
        assert decide_types(table, {}, "t")[0] == {"size": "text"}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_byte_order_mark_is_named(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes("x,y\n1,2\n".encode(encoding))
    with pytest.raises(ValueError, match=rf"set data\.encoding, such as data\.encoding={encoding}$"):
        read_table(path)
    assert [*read_table(path, encoding=encoding)] == ["x", "y"]


def test_types_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("month,grade,y\n" + "01,7,2.5\n12,1,3.5\n" * 20)
    data = Tabular(path=tmp_path / "a.csv", target="y", columns={"month": "number", "grade": "text"})
    assert data.infer_settings()["shape"] == [3]
    assert data.read_as[:2] == ["month: number, as data.columns says", "grade: text, as data.columns says"]
    with pytest.raises(
        ValueError, match=r"^data.columns: data.path=.* has no feature or target column day; it has month"
    ):
        Tabular(path=tmp_path / "a.csv", target="y", columns={"day": "text"}).setup("fit")


@pytest.mark.parametrize("names", [["id"], ["id", "part"], [None], ["a"]])
def test_an_index_with_a_name_is_a_column(tmp_path: Path, names: list[str | None]) -> None:
    made = pd.DataFrame({"a": [1, 2], "b": [3, 4]})
    levels = [[7, 5], ["x", "y"]][: len(names)]
    made.index = pd.MultiIndex.from_arrays(levels, names=names) if names[1:] else pd.Index(levels[0], name=names[0])
    made.to_parquet(tmp_path / "a.parquet")
    assert [*read_table(tmp_path / "a.parquet")] == list(dict.fromkeys([*filter(None, names), "a", "b"]))


def test_an_index_of_texts_without_a_name_is_said(tmp_path: Path) -> None:
    pd.DataFrame({"a": [1, 2]}, index=["x", "y"]).to_parquet(tmp_path / "a.parquet")
    with pytest.warns(UserWarning, match=r"a\.parquet: the index has no name, so it is left out; give it a name"):
        read_table(tmp_path / "a.parquet")


def test_types_of_parquet_files(tmp_path: Path) -> None:
    from decimal import Decimal

    rows = pd.DataFrame(
        {
            "whole": pd.array([1, None, 3, 4] * 10, "Int64"),
            "flag": pd.array([True, None, False, True] * 10, "boolean"),
            "kind": pd.Categorical(["a", "b", None, "a"] * 10),
            "money": [Decimal("1.50"), Decimal("2.25"), Decimal("3"), Decimal("4")] * 10,
            "code": ["01", "1", "2", "3"] * 10,
            "y": np.arange(40.0),
        }
    )
    rows.to_parquet(tmp_path / "a.parquet")
    data = Tabular(path=tmp_path / "a.parquet", target="y", fill_missing=True)
    data.setup("fit")
    assert data.statistics["categories"] == {
        "flag": ["False", "True"],
        "kind": ["a", "b"],
        "code": ["01", "1", "2", "3"],
    }
    assert data.statistics["numbers"].keys() == {"whole", "money"}
    rows.to_csv(tmp_path / "a.csv", index=False)  # a new file of the other kind
    assert torch.equal(data.read([tmp_path / "a.csv"])[0], data.read([tmp_path / "a.parquet"])[0])


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["31.01.2024", "01.02.2024"], "dates"),
        (["31 Jan 2024", "1 Feb 2024", "2 March 2023"], "dates"),
        (["Jan 31, 2024", "May 1, 2023", "Sept. 2, 2023"], "dates"),
        (["Jan-24", "Feb-24", "Mar-24"], "dates"),
        (["2024-01", "2024-02", "2023/11"], "dates"),
        (["12:30 PM", "1:05 am", "2:15 pm"], "dates"),
        (["\u20b95", "\u20b97.5"], "number"),
        (["2020-W01", "2020-W53", "2021W07"], "dates"),
        (["2020Q1", "2020-Q2", "Q3 2020"], "dates"),
        (["00:10.2", "01:02.5", "02:00.1"], "dates"),
        ([f"{i}/100" for i in range(21)], "number"),
        ([f"{120 + i}/{80 + i}" for i in range(21)], "number"),
        ([f"{'<>'[i % 2]}{i}" for i in range(21)], "number"),
        ([f"{i} \u00b1 0.{i}" for i in range(21)], "number"),
        ([f"{i}_000" for i in range(21)], "number"),
        ([f"{i}-{i + 5}" for i in range(21)], "number"),
        ([f"{i} years old" for i in range(21)], "number"),
        (["5\u2030", "6\u2030"], "number"),
        (["5-", "6-"], "number"),
        (["\u0663", "\u0664"], "number"),
        (["\uff11\uff12", "\uff13"], "number"),
    ],
)
def test_texts_that_stand_for_dates_and_numbers_are_no_categories(texts: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=rf"column c has .*{problem}.*columns='\{{c: text}}'"):
        decide_types(pd.DataFrame({"c": texts}), {}, "a.csv")
    assert decide_types(pd.DataFrame({"c": texts}), {"c": "text"}, "a.csv")[0] == {"c": "text"}


@pytest.mark.parametrize(
    "texts",
    [
        ["5 marbles", "6 marbles"],
        ["may", "june"],
        ["A-1", "B-2"],
        ["16:9", "4:3"],
        ["0-4", "5-9", "10-19", "20-64", "65+"],
        ["<5", ">5"],
        [f"store {i}" for i in range(30)],
        [f"#{i % 16:x}{i:02x}a" for i in range(30)],
        [f"{i}{'ABC'[i % 3]}" for i in range(30)],
    ],
)
def test_names_with_digits_are_categories(texts: list[str]) -> None:
    assert decide_types(pd.DataFrame({"c": texts}), {}, "a.csv")[0] == {"c": "text"}


def test_a_line_may_be_longer_than_a_cell(tmp_path: Path) -> None:
    """As the header of a table with many columns, which with another separator would be a single cell."""
    names = [f"{letter * 9000}" for letter in "abcdefghijklmnop"]
    (tmp_path / "a.csv").write_text(f"{','.join(names)}\n{','.join('1' for _ in names)}\n")
    assert read_table(tmp_path / "a.csv").columns.tolist() == names


def test_a_million_columns_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"{'a,' * 1_000_000}target\n1\n")
    with pytest.raises(ValueError, match=r"1,000,001 columns, more than 200,000") as error:
        read_table(tmp_path / "a.csv")
    assert len(str(error.value)) < 300


def test_dates_without_separators_are_no_numbers(tmp_path: Path) -> None:
    table = pd.DataFrame({"day": ["20240131", "20240201", "20231224"]})
    with pytest.raises(ValueError, match=r"column day has dates, such as 20240131; .* data.columns='\{day: number\}'"):
        decide_types(table, {}, "t")
    assert decide_types(table, {"day": "number"}, "t")[0] == {"day": "number"}
    assert decide_types(pd.DataFrame({"id": ["20240131", "20241301", "20231224"]}), {}, "t")[0] == {"id": "number"}


@pytest.mark.parametrize(
    "cells",
    [
        ["Red", "red", "blue"],
        ["\u00e9", "e\u0301", "x"],
        ["A1", "\uff211", "B"],
        ["a b", "a  b", "c"],
        ["ab", "ab\u200b", "c"],
    ],
)
def test_categories_that_are_spelled_in_two_ways_are_named(cells: list[str]) -> None:
    with pytest.warns(UserWarning, match=r"column c has .* and .* as different categories; write them alike"):
        assert decide_types(pd.DataFrame({"c": cells}), {}, "t")[0] == {"c": "text"}


def test_a_line_with_more_cells_than_the_header_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n" + "1,2\n" * 5 + "1,2,\n")
    with pytest.raises(ValueError, match="line 1, the header, has 2 cells, but line 7 has 3; correct line 7"):
        read_table(tmp_path / "a.csv")
