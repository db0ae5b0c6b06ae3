import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import Script
from PIL import Image
from sklearn.datasets import load_diabetes, load_digits
from third_party.own_data import make_raw

from boltcutter.assembly.overrides import load_evaluation_config
from boltcutter.config.errors import ConfigError
from boltcutter.export.serving.app import Limits, Service
from boltcutter.export.serving.predictor import Predictor, _as_structure
from boltcutter.project import Project
from boltcutter.structure import is_alike, outline


def load(folder: Path, export: str | None = None, *overrides: str) -> Predictor:
    cfg, _ = load_evaluation_config(Project.find(__file__), {"run": str(folder)}, overrides)
    return Predictor(cfg, folder, export=export)


@pytest.fixture(scope="module")
def digits(trained: Path) -> Predictor:
    return load(trained)


@pytest.fixture(scope="module")
def diabetes(diabetes_run: Path) -> Predictor:
    return load(diabetes_run)


def test_images_are_predicted(digits: Predictor) -> None:
    pixels, labels = load_digits(return_X_y=True)
    images = np.rint(pixels[:50].reshape(-1, 1, 8, 8) * 255 / 16).astype(np.uint8)
    found = digits.format(digits.predict(digits.array(images.tolist())))
    assert np.mean([int(one["class"]) == label for one, label in zip(found, labels, strict=False)]) >= 0.9
    assert all(abs(sum(one["probabilities"].values()) - 1) < 1e-5 for one in found)
    file = io.BytesIO()
    Image.fromarray(images[0, 0]).save(file, "PNG")
    assert np.array_equal(digits.image(file.getvalue()), images[:1])
    assert digits.describe() == {
        **{
            "name": "digits-convnet",
            "run": digits.run,
            "input": "image",
            "classes": [*"0123456789"],
            "shape": [1, 8, 8],
        }
    }


@pytest.mark.parametrize(
    ("precision", "weights", "computes"),
    [
        ("bf16-true", torch.bfloat16, torch.bfloat16),
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("64-true", torch.float64, torch.float64),
    ],
)
def test_the_precision_of_the_run_is_used(
    trained: Path, digits: Predictor, precision: str, weights: torch.dtype, computes: torch.dtype
) -> None:
    predictor = load(trained, None, f"trainer.precision={precision}")
    seen: list[torch.dtype] = []
    predictor.task.model.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    assert {parameter.dtype for parameter in predictor.task.parameters()} == {weights}
    images = digits.array(np.random.default_rng(0).random((8, 1, 8, 8), np.float32))
    found, expected = predictor.predict(images), digits.predict(images)
    assert (found.dtype, {*seen}) == (np.float32, {computes})
    assert torch.get_default_dtype() == torch.float32
    assert np.abs(found - expected).max() < 0.1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1, 2]], "shape [1, 2], expected [N, 1, 8, 8]"),
        ([[1], [2, 3]], "not a regular array"),
        (["a"], "not numbers"),
        ([None], "not numbers"),
        ([[[[256] * 8] * 8]], "pixels are not between 0 and 255"),
        ([[[[-1] * 8] * 8]], "pixels are not between 0 and 255"),
        ([[[[float("nan")] * 8] * 8]], "not all values are finite"),
        ([[[[10**400] * 8] * 8]], "not numbers"),
    ],
)
def test_invalid_arrays(digits: Predictor, values: object, message: str) -> None:
    with pytest.raises(ValueError, match="inputs") as error:
        digits.array(values)
    assert message in str(error.value)


def test_arrays_are_preprocessed_by_the_data_module(digits: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.full((2, 1, 8, 8), 0.5, np.float32)
    assert np.array_equal(digits.array(images), images)
    monkeypatch.setattr(digits.data, "preprocess", lambda inputs: torch.from_numpy(inputs) - 2, raising=False)
    assert np.array_equal(digits.array(images), images - 2)
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8), 9, np.uint8)).save(file, "PNG")
    monkeypatch.setattr(digits.data, "preprocess", lambda inputs: torch.from_numpy(inputs) / 3, raising=False)
    assert np.array_equal(digits.image(file.getvalue()), np.full((1, 1, 8, 8), 3.0))


def test_the_model_sees_what_it_was_trained_on(script: Script, tmp_path: Path) -> None:
    own = ["data=synthetic", "data._target_=third_party.own_data.Own", "data.shape=[6]", "data.num_classes=2"]
    options = [*own, "model=linear", "logger=null", "test=false", "report=false", f"folder={tmp_path}"]
    done = script("train", *options, "trainer.max_epochs=1", env={"PYTHONPATH": "tests"})
    assert done.returncode == 0, done.stderr
    predictor = load(tmp_path)
    raw, _ = make_raw()  # (N, 2, 3)
    predictor.data.setup("fit")
    trained_on = predictor.data.splits.train.tensors[0]
    assert torch.equal(torch.from_numpy(predictor.array(raw[:40].tolist())), trained_on)
    assert torch.equal(torch.from_numpy(predictor.array(raw[:40])), trained_on)
    with pytest.raises(ValueError, match=r"^inputs: preprocess refuses shape \[2, 6\]: "):
        predictor.array(np.zeros((2, 6)))
    with pytest.raises(ValueError, match=r"^inputs: not all values are finite$"):
        predictor.array(np.full((2, 2, 3), np.nan))


def test_several_inputs_are_read_as_they_were_in_training(script: Script, tmp_path: Path) -> None:
    own = ["data._target_=third_party.own_data.PairsData", "model._target_=third_party.own_data.Second"]
    options = [
        "logger=null",
        "test=false",
        "report=false",
        "trainer.max_epochs=1",
        "data.batch_size=8",
        f"folder={tmp_path / 'run'}",
    ]
    done = script("train", *own, *options, env={"PYTHONPATH": "tests"})
    assert done.returncode == 0, done.stderr
    predictor = load(tmp_path / "run")
    assert predictor.describe()["structure"] == ["float32", "float32"]
    given = [[[0, 0, 0, 0], [1, 0, 1, 0]], [[5, 5, 5, 5], [1, 0, 1, 0]], [[5, 5, 5, 5], [9, 0, 1, 0]]]
    first, second, third = predictor.predict(predictor.samples(given)).tolist()
    assert first == second != third
    for wrong in ([[0, 0, 0, 0]], [[[0] * 4] * 3], [{"a": [0] * 4, "b": [0] * 4}], np.zeros((1, 2, 4))):
        with pytest.raises(ValueError, match=r"^inputs: .*a sample is not a list of 2 inputs"):
            predictor.samples(wrong)
    predictor.data.preprocess = lambda values: [(torch.tensor(value), 0) for value in values]
    with pytest.raises(ValueError, match=r"preprocess returns samples like float32, and .*; return the same"):
        predictor.samples([[[0.0] * 4] * 2])


def test_a_damaged_image(digits: Predictor) -> None:
    with pytest.raises(ValueError, match=r"^the image: not a valid image \("):
        digits.image(b"\x89PNG\r\n\x1a\n damaged")


@pytest.mark.parametrize("size", [(1, 600_000), (9_000, 9_000)])
def test_a_small_file_with_too_many_pixels(digits: Predictor, size: tuple[int, int]) -> None:
    file = io.BytesIO()
    Image.new("1", size).save(file, "PNG")
    assert len(file.getvalue()) < 100_000
    with pytest.raises(ValueError, match=r"^the image: \d+ x \d+ pixels are too many"):
        digits.image(file.getvalue())


def test_other_formats_are_not_decoded(digits: Predictor) -> None:
    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "TIFF")
    with pytest.raises(ValueError, match="not a valid PNG or JPEG image"):
        digits.image(file.getvalue())


@pytest.mark.slow
def test_rows_are_predicted_in_the_unit_of_the_target(diabetes: Predictor) -> None:
    frame = load_diabetes(as_frame=True, scaled=False).frame
    columns = frame.drop(columns="target")
    found = diabetes.format(diabetes.predict(diabetes.rows(columns.to_dict("records"))))
    assert np.corrcoef([one["values"][0] for one in found], frame["target"])[0, 1] > 0.6
    assert diabetes.describe()["input"] == "row"
    assert diabetes.describe()["columns"] == dict.fromkeys(columns, "number")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"age": None}, "column age has a missing value"),
        ({"age": "NA"}, "column age has a missing value"),
        ({"age": "inf"}, "column age has an infinite value"),
        ({"age": 10**400}, "column age has an infinite value|a number is too large"),  # for pandas 2
        ({"age": "old"}, "column age must be numeric"),
        ({"age": [1]}, "column age: expected numbers or texts"),
        ({"other": 1}, "no column age"),
    ],
)
def test_invalid_rows(diabetes: Predictor, change: dict[str, object], message: str) -> None:
    row = dict.fromkeys(diabetes.describe()["columns"], 1.0)
    if "other" in change:
        del row["age"]
    with pytest.raises(ValueError, match=message):
        diabetes.rows([row | change])


def test_a_text_is_generated_in_pieces(text_run: Path) -> None:
    predictor = load(text_run)
    assert predictor.describe()["input"] == "text"
    pieces = list(predictor.generate("Grüße", 40, temperature=0.8, top_k=5, seed=1))
    prompt = torch.tensor(predictor.data.tokenizer.encode("Grüße".encode()))
    tokens = list(predictor.task.generate(prompt, 40, temperature=0.8, top_k=5, seed=1))
    assert "".join(pieces) == predictor.data.tokenizer.decode(tokens)
    assert len(pieces) > 5
    assert pieces == list(predictor.generate("Grüße", 40, temperature=0.8, top_k=5, seed=1))


def test_statistics_of_another_data_module_are_one_line(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def restore(data: Any, *_: Any) -> None:
        data.statistics = {"columns": ["a"], "categories": [1]}

    monkeypatch.setattr("boltcutter.export.serving.predictor.restore", restore)
    with pytest.raises(ConfigError, match=r"^ckpt=best: its statistics are not those of Digits \(.*; use one of run="):
        load(trained)


def test_the_page_of_ten_classes_of_structured_inputs(digits: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "form", "samples")
    monkeypatch.setattr(digits, "structure", ["float32", "int64"])
    assert "Draw a digit" not in Service(digits, Limits()).html


@pytest.mark.slow
def test_exports_predict_what_the_checkpoint_does(script: Script, diabetes_run: Path, text_run: Path) -> None:
    for folder in (diabetes_run, text_run):
        done = script("export", f"run={folder}", "export=onnx")
        assert done.returncode == 0, done.stdout + done.stderr
    original, exported = load(diabetes_run), load(diabetes_run, "onnx")
    rows = original.rows([dict.fromkeys(original.describe()["columns"], value) for value in (1.0, 50.0, 200.0)])
    assert np.allclose(original.predict(rows), exported.predict(rows), rtol=1e-4)
    settings: dict[str, Any] = {"temperature": 0, "top_k": None, "seed": 0}
    text = "".join(load(text_run).generate("Grüße", 40, **settings))
    exported = load(text_run, "onnx")
    assert "".join(exported.generate("Grüße", 40, **settings)) == text
    assert exported.task.model.supports_cache


class Pair(NamedTuple):
    features: torch.Tensor
    mask: torch.Tensor


def test_samples_of_a_class_are_made_from_objects() -> None:
    structure = outline(Pair(torch.zeros(2), torch.zeros(2, dtype=torch.long)))
    found = _as_structure({"features": [1, 2.5], "mask": [1, 0]}, structure)
    assert isinstance(found, Pair)
    assert (found.features.tolist(), found.mask.dtype) == ([1, 2.5], torch.int64)
    assert is_alike(found, structure)
    large = _as_structure({"features": [1, 2], "mask": [16777217.0, 0]}, structure)
    assert large.mask.tolist() == [16777217, 0]
    for mask in ([1.5, 0], [1, -1], [300, 0], [float("nan"), 0]):  # torch would make 1, 255 and 44 of them
        with pytest.raises(ValueError, match=r"a sample\[mask\] has numbers that uint8, its type in training"):
            _as_structure({"features": [1], "mask": mask}, structure | {"mask": "uint8"})
    for features in (["1"], [[1], [1, 2]], None, {}):
        with pytest.raises(ValueError, match=r"a sample\[features\] is no array of numbers: "):
            _as_structure({"features": features, "mask": [1, 0]}, structure)
    with pytest.raises(ValueError, match="a sample is not an object with features, mask"):
        _as_structure([[1, 2], [1, 0]], structure)
    for path in ("nowhere.Pair", "os.path", f"{__name__}.torch"):
        with pytest.raises(ValueError, match=rf"a sample is a {path} in training; make it in a method preprocess"):
            _as_structure({}, {"_target_": path})
