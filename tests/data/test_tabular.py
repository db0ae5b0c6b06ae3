import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import Script
from omegaconf import OmegaConf

from boltcutter.assembly.assemble import read_config
from boltcutter.config.instantiate import build
from boltcutter.config.settings import Settings
from boltcutter.data.tabular import Tabular
from boltcutter.evaluation import evaluate
from boltcutter.project import Project

CONFIGS = Path(__file__).parents[2] / "configs" / "data"

PROJECT = Project.find(Path(__file__))


def table(count: int = 200) -> pd.DataFrame:
    random = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "age": random.normal(50, 10, count),
            "city": random.choice(["Rome", "Oslo", "Lima"], count),
            "smokes": random.random(count) < 0.5,
            "rooms": random.integers(1, 9, count),
            "price": random.normal(1000, 300, count),
            "kind": random.choice(["flat", "house"], count, p=[0.25, 0.75]),
        }
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    table().to_csv(tmp_path / "homes.csv", index=False)
    return tmp_path / "homes.csv"


def parts(data: Tabular) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data.setup("fit")
    assert data.splits is not None
    return [(split.inputs, split.targets) for split in data.splits]  # type: ignore[attr-defined]


def indices(data: Tabular) -> list[list[int]]:
    """Rows of ``table()`` in each split, identified by their price."""
    prices = table()["price"].astype(np.float32).tolist()
    return [[prices.index(value) for value in targets[:, 0].tolist()] for _, targets in parts(data)]


def test_diabetes_is_standardized_by_the_train_split() -> None:
    data = Tabular()
    assert data.infer_settings() == {"shape": [10], "num_classes": 1, "kind": "regression"}
    train, _, test = parts(data)
    assert (train[0].dtype, train[1].dtype, train[1].shape) == (torch.float32, torch.float32, (310, 1))
    assert train[0].mean(0).abs().max() < 1e-5
    assert (train[0].std(0, correction=0) - 1).abs().max() < 1e-5
    assert test[0].mean(0).abs().max() > 1e-3
    assert data.statistics["target_mean"] == [pytest.approx(train[1].mean().item())]
    assert data.statistics["target_std"] == [pytest.approx(train[1].std(correction=0).item())]
    assert data.kind == "regression"
    assert 30 < data.statistics["numbers"]["age"][0] < 70  # years, not what scikit-learn scales by all patients
    assert data.statistics["columns"][:3] == ["age", "sex", "bmi"]


def test_columns_are_encoded(path: Path) -> None:
    data = Tabular(path=path, target="price")
    inputs, _ = parts(data)[0]
    rows = table().iloc[indices(data)[0]]
    assert data.infer_settings() == {
        "shape": [8],
        "num_classes": 1,
        "kind": "regression",
    }  # age, three cities, smokes, rooms, two kinds
    assert data.statistics["categories"] == {"city": ["Lima", "Oslo", "Rome"], "kind": ["flat", "house"]}
    assert np.array_equal(inputs[:, 1:4], rows["city"].to_numpy()[:, None] == np.array([["Lima", "Oslo", "Rome"]]))
    for column, name in ((0, "age"), (4, "smokes"), (5, "rooms")):
        values = rows[name].astype(float)
        assert np.allclose(inputs[:, column], (values - values.mean()) / values.std(ddof=0), atol=1e-5)


def test_statistics_do_not_depend_on_val_and_test_rows(path: Path) -> None:
    before = Tabular(path=path, target="price", fill_missing=True)
    train, val, test = indices(before)
    changed = table()
    for rows in (val, test):
        changed.loc[rows, ["age", "rooms", "price"]] = 10**6
        changed.loc[rows, "city"] = "Atlantis"
        changed.loc[rows[0], "age"] = np.nan
    changed.to_csv(path, index=False)
    after = Tabular(path=path, target="price", fill_missing=True)
    assert torch.equal(parts(before)[0][0], parts(after)[0][0])
    assert after.statistics == before.statistics
    assert not torch.equal(parts(before)[2][0], parts(after)[2][0])
    changed.loc[train[0], "age"] = 99
    changed.to_csv(path, index=False)
    other = Tabular(path=path, target="price", fill_missing=True)
    other.setup("fit")
    assert other.statistics != before.statistics


def test_missing_values_become_the_median_and_unseen_text_zeros(path: Path) -> None:
    holes = table()
    holes.loc[::7, "age"] = np.nan
    holes.loc[1::7, "age"] = np.inf
    holes.loc[::5, "city"] = None
    holes.to_csv(path, index=False)
    data = Tabular(path=path, target="price", fill_missing=True)
    train = indices(data)[0]
    known = holes["age"].iloc[train].replace(np.inf, np.nan)
    median, mean, std = data.statistics["numbers"]["age"]
    assert median == pytest.approx(known.median())
    assert [mean, std] == pytest.approx([known.fillna(median).mean(), known.fillna(median).std(ddof=0)])
    inputs = parts(data)[0][0]
    assert torch.isfinite(inputs).all()
    assert data.statistics["categories"]["city"] == ["Lima", "Oslo", "Rome"]
    empty = np.array(train) % 5 == 0
    assert not inputs[empty, 1:4].any()
    assert (inputs[~empty, 1:4].sum(1) == 1).all()
    row = table(1).assign(city="Atlantis", age=np.nan)
    row.to_csv(path, index=False)
    assert data.read([path])[0][0, :4].tolist() == pytest.approx([(median - mean) / std, 0, 0, 0])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_missing_and_infinite_numbers_are_an_error(path: Path, value: float) -> None:
    rows = table()
    rows.loc[[3, 5], "age"] = value
    rows.loc[::5, "city"] = None  # text may be missing
    rows.to_csv(path, index=False)
    with pytest.raises(ValueError, match=r"column age has 2 missing or infinite values; .* data.fill_missing=true"):
        Tabular(path=path, target="price").setup("fit")
    Tabular(path=path, target="price", ignore=["age"]).setup("fit")
    data = Tabular(path=path, target="price", fill_missing=True)
    data.setup("fit")
    data.fill_missing = False
    with pytest.raises(ValueError, match=r"homes.csv: column age has 2 missing or infinite values"):
        data.read([path])


def test_a_test_fraction_of_zero_leaves_out_the_test_split(path: Path) -> None:
    data = Tabular(path=path, target="kind", split=(0.9, 0.1, 0))
    assert [len(split[0]) for split in parts(data)] == [180, 20, 0]
    assert data.empty_splits == {"test"}


@pytest.mark.parametrize(("target", "classes"), [("kind", ["flat", "house"]), ("smokes", ["False", "True"])])
def test_text_and_booleans_are_classes(path: Path, target: str, classes: list[str]) -> None:
    data = Tabular(path=path, target=target)
    splits = parts(data)
    assert data.kind == "classification"
    assert data.classes == data.statistics["classes"] == classes
    assert data.infer_settings()["num_classes"] == 2
    shares = [targets.float().mean().item() for _, targets in splits]
    assert shares[1:] == pytest.approx([shares[0]] * 2, abs=0.03)
    assert splits[0][1].dtype == torch.int64
    assert "target_mean" not in data.statistics


def test_integers_can_be_classes_and_keep_their_order(path: Path) -> None:
    table().assign(rooms=np.arange(200) % 20).to_csv(path, index=False)
    data = Tabular(path=path, target="rooms", kind="classification", split=(0.6, 0.2, 0.2))
    parts(data)
    assert data.classes == [str(number) for number in range(20)]
    names = [f"{number} rooms" for number in range(20)]
    named = Tabular(path=path, target="rooms", split=(0.6, 0.2, 0.2), classes=names)
    for number in range(2):
        assert all(torch.equal(a, b) for a, b in zip(parts(named)[0], parts(data)[0], strict=True))
        assert (named.kind, named.classes, named.statistics["classes"]) == ("classification", names, data.classes)
        named.load_state_dict(data.state_dict() | {"statistics": data.statistics | {"new": number}})
        assert (named.splits, named.classes) == (None, names)
    assert Tabular(path=path, target="rooms").infer_settings()["num_classes"] == 1


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        (np.arange(200) % 2, {"classification", "regression"}),
        (np.arange(200) % 7 - 3.0, {"classification", "regression"}),
        (np.arange(200) % 7 / 2, {"regression"}),
        (np.arange(200), {"regression"}),
        (np.array(["a", "b"] * 100), {"classification"}),
    ],
)
def test_a_target_is_what_the_task_expects_if_it_can_be(path: Path, values: Any, kinds: set[str]) -> None:
    table().assign(rooms=values).to_csv(path, index=False)
    data = Tabular(path=path, target="rooms")
    data.infer_settings()
    assert data.possible_kinds == kinds
    given = ["data=tabular", f"data.path={path}", "data.target=rooms", "model=mlp"]
    for kind in ("classification", "regression"):
        if kind in kinds:
            cfg = read_config(PROJECT, [*given, f"task={kind}"])
            assert cfg.data["kind"] == kind
            assert cfg.data["num_classes"] == (len({*values}) if kind == "classification" else 1)
        else:
            assert read_config(PROJECT, [*given, f"task={kind}"]).data["kind"] != kind  # which is refused later


def test_several_targets_and_ignored_columns(path: Path) -> None:
    data = Tabular(path=path, target=["price", "rooms"], ignore=["city", "kind"])
    targets = parts(data)[0][1]
    assert data.infer_settings() == {"shape": [2], "num_classes": 2, "kind": "regression"}
    assert targets.shape == (140, 2)
    assert data.statistics["target_std"] == pytest.approx(targets.double().std(0, correction=0).tolist())


def test_names_of_classes_of_a_target_that_has_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^data.classes=\[a,b\]: 2 names, but the data has 214 classes; give as many"):
        Tabular(classes=["a", "b"]).setup("fit")


def test_a_target_that_is_given_twice_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data.target=\['price', 'price'\]: price is there more than once; remove"):
        Tabular(path=path, target=["price", "price"])


def test_parquet_and_compressed_csv_give_the_same_table(path: Path, tmp_path: Path) -> None:
    table().to_parquet(tmp_path / "homes.parquet")
    table().to_csv(tmp_path / "homes.csv.gz", index=False)
    prints = {
        Tabular(path=tmp_path / f"homes{end}", target="price").fingerprint() for end in (".csv", ".csv.gz", ".parquet")
    }
    assert len(prints) == 1


def test_a_checkpoint_is_enough_to_predict(path: Path) -> None:
    before = Tabular(path=path, target="kind")
    before.setup("fit")
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    new = path.with_name("new.csv")
    table(3).drop(columns="kind")[::-1].to_csv(new, index=False)
    wanted = before.read([new])
    path.unlink()
    after = Tabular(path=path, target="kind")
    after.load_state_dict(torch.load(file, weights_only=True))
    found, names = after.read([new])
    assert torch.equal(found, wanted[0])
    assert names == wanted[1] == [f"{new}:{row}" for row in (1, 2, 3)]
    assert (after.kind, after.classes) == ("classification", ["flat", "house"])


def test_another_table_is_standardized_by_the_checkpoint(path: Path, tmp_path: Path) -> None:
    before = Tabular(path=path, target="price")
    before.setup("fit")
    other = tmp_path / "other.csv"
    table(100).assign(age=lambda t: t["age"] + 20).to_csv(other, index=False)
    after = Tabular(path=other, target="price")
    after.setup("test")  # as Lightning does, before it loads the checkpoint
    own = next(iter(after.test_dataloader()))[0]
    after.load_state_dict(before.state_dict())
    given = next(iter(after.test_dataloader()))[0]
    assert after.statistics == before.statistics
    after.splits = None  # as load_state_dict leaves it
    assert sum(len(rows) for rows, _ in evaluate._loader(after, "all")) == 100
    assert (given - own)[:, 0].mean() > 1.5  # 20 years are two deviations


def test_a_text_column_stays_text_if_a_new_file_has_only_numbers(path: Path) -> None:
    table().assign(city=np.where(np.arange(200) % 2, "7", "A7")).to_csv(path, index=False)
    data = Tabular(path=path, target="price")
    parts(data)
    table(3).assign(city=["7", None, "7"]).to_csv(path, index=False)
    assert data.read([path])[0][:, 1:3].tolist() == [[1, 0], [0, 0], [1, 0]]


def test_a_missing_value_differs_from_the_text_none(tmp_path: Path) -> None:
    city = np.array(["None", "nan", None, "Rome"] * 50, object)
    table().assign(city=city).to_parquet(tmp_path / "a.parquet")
    data = Tabular(path=tmp_path / "a.parquet", target="price")
    kinds = np.array(indices(data)[0]) % 4
    assert data.statistics["categories"]["city"] == ["None", "Rome", "nan"]
    assert np.array_equal(parts(data)[0][0][:, 1:4], np.stack([kinds == 0, kinds == 3, kinds == 1], 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target": None},
            r"^data.target is not set; set it to a column of .*homes.csv, such as data.target=price$",
        ),
        (
            {"target": "prize"},
            r"^data.target: data.path=.* has no column prize; it has age, city, smokes, rooms, price, kind$",
        ),
        ({"ignore": ["x"]}, r"^data.ignore: data.path=.* has no column x; it has age"),
        ({"target": ["price", "kind"]}, r"data.target=\['price', 'kind'\]: classification needs one column"),
        ({"target": "kind", "kind": "regression"}, r"column kind must be numeric, but row 1 has '.*'; correct it"),
        ({"shape": (3,)}, r"^data.shape=\(3,\), but data.path=.* has \(8,\); set it to null to infer it$"),
        (
            {"target": "kind", "num_classes": 9},
            r"^data.num_classes=9, but data.path=.* has 2; set it to null",
        ),
        ({"num_classes": 2}, r"^data.num_classes=2, but data.path=.* has 1; set it to null"),
        ({"ignore": ["age", "city", "smokes", "rooms", "kind"]}, r"no feature column is left"),
        (
            {"path": Path("homes.xlsx")},
            r"^data.path=homes.xlsx: expected a file name that ends in .csv, .csv.gz or .parquet",
        ),
        ({"path": Path("gone.csv")}, r"^data.path=gone.csv: no such file; give the path of a table$"),
    ],
)
def test_invalid_settings_are_one_line_errors(path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tabular(**({"path": path, "target": "price"} | settings)).setup("fit")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", r"a.csv: not a valid table \(No columns to parse from file\); replace it"),
        ("a.csv", b"age,price\n", r"a.csv: the table has no rows"),
        ("a.csv", b"age,price\na,kg\n" + b"1,2\n3,4\n" * 9, r"column \w+ has '\w+', .*; remove the first row .*header"),
        ("a.csv", b"# of 2024\nage,size\n1,2\n", r"a.csv: line 1, the header, has 1 cell, but line 2 has 2; remove"),
        ("a.csv", b"\xff\xfe\x00", r"a.csv: not a text in UTF-8; set data.encoding"),
        ("a.csv", b"age,price\nm\xfcde,2\n", r"a.csv: not a text in UTF-8; set data.encoding, such as"),
        ("a.csv", b"age,age,price\n1,2,3\n", r"a.csv: column age appears more than once; rename"),
        ("a.csv.gz", b"no gzip", r"a.csv.gz: not a valid table"),
        ("a.parquet", b"no parquet", r"a.parquet: not a valid table"),
        ("a.csv", b"age,price\n1,2\n3,\n", r"1 rows have no price; remove these rows"),
        ("a.csv", b"age,price\n" + b"1,inf\n" * 20, r"price has infinite values; correct these rows"),
        (
            "a.csv",
            b"age,price\n" + b"1,1e9\n1,1000000000.1\n" * 20,
            r"price has values from 1e.09 to .* lost in 32 bits",
        ),
        (
            "a.csv",
            b"age,price\n" + b"1,1e39\n1,2\n" * 20,
            r"price has values from 2 to 1e.39, whose differences are lost",
        ),
        ("a.csv", b"a,b;price\n" + b"1,2;3\n" * 20, r"has no column price; it has a, b;price; set data.separator"),
        ("a.csv", b"age,price\n" + b"1,yes\n" * 20, r"price has only one class"),
        ("a.csv", b"age,price\n1,2\n", r"data: a fraction of 0.15 of 1 samples cannot be split off"),
    ],
)
def test_damaged_tables_are_an_error(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        Tabular(path=tmp_path / name, target="price").setup("fit")
    assert "\n" not in str(error.value)


def test_new_rows_with_other_columns_are_an_error(path: Path) -> None:
    data = Tabular(path=path, target="price")
    new = path.with_name("new.csv")
    table(3).drop(columns=["age", "city"]).to_csv(new, index=False)
    with pytest.raises(ValueError, match=r"^.*new.csv: no column age, city, which training had; it has smokes, rooms"):
        data.read([new])
    table(3).assign(age="old").to_csv(new, index=False)
    with pytest.raises(ValueError, match=r"^.*new.csv: column age must be numeric, but row 1 has 'old'; correct it$"):
        data.read([new])


def test_dates_are_an_error(tmp_path: Path) -> None:
    table().assign(day=pd.Timestamp("2020-01-01")).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"column day has dates; convert it to numbers, or set data.ignore=\[day\]"):
        Tabular(path=tmp_path / "a.parquet", target="price").setup("fit")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([f"2024-{1 + day // 28:02}-{1 + day % 28:02}" for day in range(200)], "column day has dates; .*ignore"),
        ([f"{1 + day % 28}/{1 + day // 28}/2024" for day in range(200)], "column day has dates"),
        ([f"{hour % 24:02}:00" for hour in range(200)], "column day has dates"),
        (
            [f"name {row}" for row in range(200)],
            r"column day has \d+ different texts, such as 'name .*'.*set data.ignore=\[day\], or data.max_categories",
        ),
    ],
)
def test_columns_of_dates_and_many_texts_are_an_error(tmp_path: Path, texts: list[str], message: str) -> None:
    table = pd.DataFrame({"day": texts, "x": np.arange(200.0), "y": np.arange(200.0)})
    table.to_csv(tmp_path / "table.csv", index=False)
    with pytest.raises(ValueError, match=message):
        Tabular(path=tmp_path / "table.csv", target="y").setup("fit")
    Tabular(path=tmp_path / "table.csv", target="y", ignore=["day"]).setup("fit")


def test_more_texts_can_be_allowed(tmp_path: Path) -> None:
    table = pd.DataFrame({"name": [f"name {row}" for row in range(200)], "y": np.arange(200.0)})
    table.to_csv(tmp_path / "table.csv", index=False)
    assert Tabular(path=tmp_path / "table.csv", target="y", max_categories=200).infer_settings()["shape"] == [140]


def test_the_option_builds(path: Path) -> None:
    cfg = Settings({"seed": 3, "data": OmegaConf.load(CONFIGS / "tabular.yaml")})
    assert build(cfg.data, "data").infer_settings() == {"shape": [10], "num_classes": 1, "kind": "regression"}
    cfg = cfg.changed({"data": {"path": str(path), "target": ["price", "rooms"], "shape": [7]}})
    assert build(cfg.data, "data").infer_settings() == {"shape": [7], "num_classes": 2, "kind": "regression"}


def test_classes_of_text_are_trained_on_without_a_test_split(script: Script, path: Path, tmp_path: Path) -> None:
    words = [f"data.path={path}", "data.target=kind", "data.split=[0.9,0.1,0]", "data=tabular", "task=classification"]
    words += ["model=linear", "logger=null", "report=false", "trainer.max_epochs=1", f"folder={tmp_path / 'run'}"]
    done = script("train", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test split") == 1
    assert not (tmp_path / "run" / "evaluation").exists()
    refused = script("evaluate", f"run={tmp_path / 'run'}", "split=test")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "split=test" in refused.stderr


def test_folds_are_stratified_and_their_statistics_exclude_the_val_fold(path: Path) -> None:
    test = parts(Tabular(path=path, target="kind"))[2][1]
    for fold in range(4):
        data = Tabular(path=path, target="kind", num_folds=4, fold=fold)
        (train, _), (_, val), (_, tested) = parts(data)
        assert torch.equal(test, tested)
        assert val.float().mean().item() == pytest.approx(0.75, abs=0.06)
        assert train[:, 0].mean().item() == pytest.approx(0, abs=1e-5)
    plain = [indices(Tabular(path=path, target="price", num_folds=4, fold=fold)) for fold in range(4)]
    assert sorted(row for _, val, _ in plain for row in val) == sorted(set(range(200)) - set(plain[0][2]))


@pytest.mark.parametrize("target", ["price", "kind"])
def test_no_group_is_in_two_splits_or_folds(path: Path, target: str) -> None:
    table().assign(patient=[f"p{row // 4}" for row in range(200)]).to_csv(path, index=False)
    ages = table()["age"].to_numpy()
    for folds in ({}, {"num_folds": 3, "fold": 1}):
        data = Tabular(path=path, target=target, group="patient", **folds)
        groups = []
        for inputs, _ in parts(data):
            _, mean, std = data.statistics["numbers"]["age"]
            rows = [int(np.abs(ages - age).argmin()) for age in (inputs[:, 0].double() * std + mean).tolist()]
            groups.append({row // 4 for row in rows})
        assert sum(map(len, groups)) == len(set.union(*groups)) == 50
        assert "patient" not in data.statistics["columns"]


def test_invalid_groups_are_an_error(path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data.group: data.path=.* has no column patient; it has age"):
        Tabular(path=path, target="price", group="patient").setup("fit")
    table().assign(patient=[None, *range(199)]).to_csv(path, index=False)
    with pytest.raises(ValueError, match=r"^data.group=patient: 1 rows have no group; remove them$"):
        Tabular(path=path, target="price", group="patient").setup("fit")


@pytest.mark.parametrize(
    ("cells", "kind", "classes"),
    [
        (["0", "1"], "classification", ["0", "1"]),
        (["no", "yes"], "classification", ["no", "yes"]),
        (["true", "false"], "classification", ["False", "True"]),
        (["NA", "DE"], "classification", ["DE", "NA"]),
        (["01", "1"], "classification", ["01", "1"]),
        (["3", "10"], "regression", None),
    ],
)
def test_which_targets_are_classes(tmp_path: Path, cells: list[str], kind: str, classes: list[str] | None) -> None:
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{row}.5,{cells[row % 2]}\n" for row in range(40)))
    data = Tabular(path=tmp_path / "a.csv", target="y")
    data.setup("fit")
    assert data.kind == kind
    assert data.statistics.get("classes") == classes
    other = Tabular(path=tmp_path / "a.csv", target="y")  # as in an evaluation
    other.load_state_dict(data.state_dict())
    assert other.fingerprint() == data.fingerprint()


def test_texts_that_are_one_number_are_one_class_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "".join(f"{row}.5,{('1.1', '1.10', '2')[row % 3]}\n" for row in range(60)))
    with pytest.warns(UserWarning, match=r"y has '1.1' and '1.10', which are the same number, so one class"):
        Tabular(path=path, target="y", kind="classification").setup("fit")
    data = Tabular(path=path, target="y", columns={"y": "text"})
    data.setup("fit")
    assert sorted(data.classes) == ["1.1", "1.10", "2"]


def test_values_that_training_did_not_have_are_reported(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Tabular(path=path, target="price")
    data.setup("fit")
    table(3).assign(city=["Rome", "Atlantis", None]).to_csv(path, index=False)
    data.read([path])
    (line,) = capsys.readouterr().err.splitlines()
    assert "column city has 1 values that training did not have, such as 'Atlantis'" in line
    table(3).assign(smokes=["2", "True", "0"]).to_csv(path, index=False)
    again = Tabular(path=path, target="price", split=(0.4, 0.3, 0.3))
    again.load_state_dict(data.state_dict())
    again.setup("fit")  # as an evaluation of this table does
    assert "column smokes has 1 values that training did not have, such as '2'; it had" in capsys.readouterr().err
    table(3).assign(smokes=["", "True", "False"]).to_csv(path, index=False)
    with pytest.raises(ValueError, match="column smokes has 1 missing or infinite values"):
        data.read([path])
    table(3).drop(columns="smokes").to_csv(path, index=False)
    with pytest.raises(ValueError, match="smokes"):  # in one line, which names the column
        again.load()
