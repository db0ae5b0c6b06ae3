import hashlib
import json
import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest
import torch
from conftest import Script
from PIL import Image
from sklearn.datasets import load_diabetes, load_digits

from boltcutter.assembly.assemble import assemble
from boltcutter.assembly.overrides import load_evaluation_config
from boltcutter.config.errors import ConfigError
from boltcutter.environment import user_key
from boltcutter.environment.this_process import this_process
from boltcutter.export import runner
from boltcutter.export.exported import ExportedModel, find_export, load_exported, verified_card
from boltcutter.export.runner import Runner, read_card
from boltcutter.prediction.generate import generate
from boltcutter.project import Project
from boltcutter.task.language import LanguageModeling


def test_images_are_predicted_as_by_the_checkpoint(script: Script, digits: Path, tmp_path: Path) -> None:
    pixels = load_digits().images[:12] * 255 / 16
    for number, image in enumerate(pixels):
        Image.fromarray(image.astype(np.uint8)).save(tmp_path / f"{number:02}.png")
    tables = []
    for name, source in (("a", "ckpt=best"), ("b", "export=onnx"), ("c", f"export={digits}/export/torch/model.pt2")):
        done = script("predict", f"run={digits}", f"input={tmp_path}", source, f"output={tmp_path}/{name}.csv")
        assert done.returncode == 0, done.stderr
        tables.append(pd.read_csv(tmp_path / f"{name}.csv"))
    for table in tables[1:]:
        pd.testing.assert_frame_equal(tables[0], table, atol=1e-5)


def test_rows_are_predicted_without_the_checkpoint(script: Script, diabetes: Path, tmp_path: Path) -> None:
    rows = load_diabetes(as_frame=True, scaled=False).data.head(20)
    rows.loc[3, "bmi"], rows.loc[4, "bp"] = np.nan, np.inf
    rows.to_csv(tmp_path / "rows.csv", index=False)
    predict = ["predict", f"run={diabetes}", f"input={tmp_path}/rows.csv", "data.fill_missing=true"]
    assert script(*predict, f"output={tmp_path}/a.csv").returncode == 0
    shutil.copytree(diabetes, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    predict[1] = f"run={tmp_path}/run"
    done = script(*predict, "export=onnx", f"output={tmp_path}/b.csv")
    assert done.returncode == 0, done.stderr
    found, expected = (pd.read_csv(tmp_path / f"{name}.csv")["prediction"] for name in "ba")
    assert np.allclose(found, expected, rtol=1e-4)
    (values,) = Runner(diabetes / "export" / "onnx")(rows.to_numpy(np.float64))
    assert np.allclose(values.ravel(), expected, rtol=1e-4)


@pytest.mark.slow
def test_text_is_continued_as_by_the_checkpoint(script: Script, gpt: Path) -> None:
    # One token, and more than the context length in all, of which the older half is then dropped.
    for prompt in ("#", "python scripts/train.py"):
        options = [f"run={gpt}", f"input={prompt}", "tokens=20", "temperature=0"]
        expected, found = script("predict", *options), script("predict", *options, "export=onnx")
        assert found.returncode == 0, found.stderr
        assert found.stdout == expected.stdout != ""


class OnDevice(torch.Tensor):
    """A tensor whose memory the host cannot read, as that of a GPU."""

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self, *options: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.mark.slow
def test_tokens_may_be_on_a_gpu(gpt: Path) -> None:
    tokens = torch.arange(6)[None]
    model = ExportedModel(gpt, "onnx")
    assert torch.equal(model(tokens.as_subclass(OnDevice), []), model(tokens, []))


def test_images_may_be_on_a_gpu(digits: Path) -> None:
    images = torch.randint(256, (2, 1, 8, 8), dtype=torch.uint8)
    model = ExportedModel(digits, "onnx")
    on_device, on_host = (next(model.predict_batches([batch])) for batch in (images.as_subclass(OnDevice), images))
    assert torch.equal(on_device, on_host)
    assert on_host.shape == (2, 10)


@pytest.mark.slow
def test_an_exported_language_model_needs_no_gpu(gpt: Path) -> None:
    cfg, folder = load_evaluation_config(Project.find(__file__), {"run": str(gpt)}, [])
    components = assemble(cfg, with_callbacks=False)
    components.trainer.strategy._accelerator = None
    components.trainer.strategy._root_device = torch.device("meta")  # whose tensors the host cannot read either
    assert generate(components, ExportedModel(folder, "onnx"), {"input": "#", "tokens": "2"}).startswith("#")


@pytest.mark.slow
@pytest.mark.parametrize("export", ["onnx", "int8-static", "int4"])
def test_a_cache_gives_the_same_text(gpt: Path, export: str) -> None:
    model = ExportedModel(gpt, export)
    task = LanguageModeling(model, optimizer=partial(torch.optim.SGD, lr=0.1))
    tokens, cache = torch.tensor([list(b"python scripts/train.py run=runs/digits model=gpt")]), list[Any]()
    parts = [model(part, cache) for part in tokens[:, :32].split([20, 11, 1], dim=1)]
    assert torch.allclose(torch.cat(parts, dim=1), model(tokens[:, :32]), atol=1e-4 if export == "onnx" else 0.1)
    assert [array.shape for array in cache] == [(1, 4, 32, 16)] * 2
    for prompt in (tokens[0, :1], tokens[0, :32], tokens[0]):  # the last one is longer than the context
        texts = []
        for supports_cache in (True, False):
            model.supports_cache = supports_cache
            texts.append(list(task.generate(prompt, 50, temperature=0)))
        assert texts[0] == texts[1]


def test_mistakes_are_one_line(digits: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"export=int2: not an export .* int8-static, onnx.*; create it"):
        find_export(digits, "int2")
    with pytest.raises(ConfigError, match="holds only weights; use another format"):
        ExportedModel(digits, "safetensors")
    shutil.copytree(digits / "export" / "onnx", tmp_path / "onnx")
    with open(tmp_path / "onnx" / "model.onnx", "ab") as file:
        file.write(b"\0")
    with pytest.raises(ConfigError, match=r"model.onnx is not the file that card.json describes; export it again"):
        ExportedModel(digits, str(tmp_path / "onnx"))


def test_a_program_of_somebody_else_is_not_unpickled(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "torch"
    shutil.copytree(digits / "export" / "torch", folder)
    ExportedModel(digits, str(folder))
    card = json.loads((folder / "card.json").read_text())
    with open(folder / card["program"], "ab") as file:  # and its digest, which anyone can compute
        file.write(b"x")
    card["files"][card["program"]]["sha256"] = hashlib.sha256((folder / card["program"]).read_bytes()).hexdigest()
    (folder / "card.json").write_text(json.dumps(card))
    with pytest.raises(ConfigError, match=r"may execute code, and you have not signed it; use an export to onnx"):
        ExportedModel(digits, str(folder))


def onnx_program(weights: str | None) -> bytes:
    """A program that adds weights, from a file if one is given."""
    tensor = onnx.TensorProto(name="w", dims=[4], data_type=1, float_data=[] if weights else [1.0] * 4)
    if weights:
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=weights)
    given, found = (onnx.helper.make_tensor_value_info(name, 1, [4]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["x", "w"], ["y"])], "g", [given], [found], [tensor])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=10)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("padding", [b"", b"\x80\x80"])
def test_a_program_of_somebody_else_takes_no_weights_from_other_files(padding: bytes, tmp_path: Path) -> None:
    content = onnx_program("../secret")
    assert content.count(b"\x08location") == 1
    content = content.replace(b"\x08location", (b"\x88" + padding + b"\x00" if padding else b"\x08") + b"location")
    facts = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    card = {"format": "onnx", "program": "model.onnx", "files": {"model.onnx": facts}, "inputs": [], "outputs": []}
    (tmp_path / "model.onnx").write_bytes(content)
    (tmp_path / "card.json").write_text(json.dumps(card))
    with pytest.raises(ConfigError, match=r"^export=onnx: model\.onnx takes weights from other files, .* trust=true"):
        verified_card(tmp_path, "export=onnx")
    (tmp_path / "card.json").write_text(json.dumps(card | {"signature": user_key.sign(card["files"])}))
    assert verified_card(tmp_path, "export=onnx")["program"] == "model.onnx"
    (tmp_path / "card.json").write_text(json.dumps(card))
    (tmp_path / "model.onnx").write_bytes(b"")  # and after the check, the content with the digest of the card
    with pytest.raises(ConfigError, match=r"^export=onnx: .*model\.onnx is not the file that card\.json describes"):
        verified_card(tmp_path, "export=onnx")


def test_weights_in_other_files_are_those_of_the_folder(tmp_path: Path) -> None:
    """Although the program is not opened by its path again, and those of other formats of ONNX Runtime are refused."""
    np.arange(4, dtype=np.float32).tofile(tmp_path / "weights")
    (file := tmp_path / "model.onnx").write_bytes(onnx_program("weights"))
    call = runner.load_onnx(file, 1, runner.sha256(file))
    assert call(np.ones(4, np.float32))[0].tolist() == [1, 2, 3, 4]
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "model.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(onnx_program(None), options, providers=["CPUExecutionProvider"])
    file.write_bytes((tmp_path / "model.ort").read_bytes())
    with pytest.raises(Exception, match="protobuf parsing failed"):
        runner.load_onnx(file, 1, runner.sha256(file))


@pytest.mark.parametrize("name", ["evil.pt2", "evil.pt2/.", "../evil.pt2", "{}/evil.pt2"])
def test_a_signed_card_cannot_name_another_program(digits: Path, tmp_path: Path, name: str) -> None:
    """The signature is of the files that the card lists; the program must be one of them."""
    folder = tmp_path / "torch"
    shutil.copytree(digits / "export" / "torch", folder)
    for place in (folder, tmp_path):
        shutil.copy(folder / "model.pt2", place / "evil.pt2")
    card = json.loads((folder / "card.json").read_text())
    (folder / "card.json").write_text(json.dumps(card | {"program": name.format(tmp_path)}))
    with pytest.raises(ConfigError, match=r"names a file that is not listed, or outside of its folder"):
        ExportedModel(digits, str(folder))


def test_a_folder_is_not_taken_for_a_program(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "evil.pt2"
    shutil.copytree(digits / "export" / "torch", folder)
    card = json.loads((folder / "card.json").read_text())
    (folder / "card.json").write_text(json.dumps(card | {"program": None, "signature": None}))
    with pytest.raises(ConfigError, match="holds only weights"):
        ExportedModel(digits, str(folder))


@pytest.mark.parametrize("format", ["torch", "onnx"])
def test_a_program_is_loaded_as_it_was_verified(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """It may change between the check and its use."""
    shutil.copytree(digits / "export" / format, tmp_path / format)
    (program := next((tmp_path / format).glob("model.*"))).write_bytes(b"evil")
    monkeypatch.setattr(runner, "sha256", lambda path: read_card(path.parent)["files"][path.name]["sha256"])
    with pytest.raises(ConfigError, match=rf"{program.name} is not the file that card\.json describes"):
        ExportedModel(digits, str(tmp_path / format))


CARD = {"format": "onnx", "program": "model.onnx", "inputs": [], "outputs": []}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["no onnx", "fifo", "/dev/zero", "fifo as statistics", "deep statistics", "no inputs"])
def test_an_export_of_somebody_else_is_one_line(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, statistics = tmp_path / "model.onnx", tmp_path / "preprocessing.json"
    content = b"this is no ONNX"
    card = CARD | {"files": {program.name: {"sha256": hashlib.sha256(content).hexdigest()}}}
    (tmp_path / "card.json").write_text(json.dumps(card))
    statistics.write_text("[" * 10**5 if kind == "deep statistics" else "{}")
    if kind == "fifo":
        os.mkfifo(program)
    elif kind == "/dev/zero":
        program.symlink_to(kind)
    else:
        program.write_bytes(content)
    if kind not in ("no onnx", "fifo", "/dev/zero"):
        monkeypatch.setattr(runner, "load_onnx", lambda *_: None)
    if kind == "fifo as statistics":
        statistics.unlink()
        os.mkfifo(statistics)
    with pytest.raises(ConfigError, match=rf"^export={tmp_path}: ") as error:
        ExportedModel(tmp_path, str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        *({"outputs": []}, {"outputs": [{"shape": []}] * 2}, {"cache": [{"shape": []}]}),
        *({"cache": [{"shape": [0, "", 0, {}]}]}, {"cache": [{"shape": [0, -1, 0, 10**30]}]}),
        *({"cache": [{"shape": [1, 2, 3, 4]}]}, {"inputs": [{"shape": [1], "max_length": "", "leaf": "a"}]}),
        *({"inputs": [{"shape": []}]}, {"takes": [], "leaves": {}}),
    ],
    ids=str,
)
def test_a_card_that_does_not_fit_its_program_is_one_line(digits: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    folder = tmp_path / "onnx"
    shutil.copytree(digits / "export" / "onnx", folder)
    card = json.loads((folder / "card.json").read_text())
    (folder / "card.json").write_text(json.dumps(card | change))
    model = ExportedModel(digits, str(folder))
    assert model.context_length == 1
    batch = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    with suppress(ConfigError):
        list(model.predict_batches([batch]))
    with pytest.raises(ConfigError, match=r"^export=.*/onnx: cannot be computed \(.+\); export it again$") as error:
        list(model.predict_batches([(batch, torch.zeros(2))]))
    assert "\n" not in str(error.value)


@pytest.mark.timeout(60)
def test_a_program_of_somebody_else_is_accepted_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"model.pt2": {"sha256": "1"}}
    card = {"format": "torch", "program": "model.pt2", "files": files, "inputs": [], "outputs": []}
    (tmp_path / "card.json").write_text(json.dumps(card))
    with pytest.raises(ConfigError, match="you have not signed it"):
        verified_card(tmp_path, "export=torch")
    monkeypatch.setattr(this_process, "trusts_all", True)
    assert verified_card(tmp_path, "export=torch") == card


@pytest.mark.parametrize("kind", ["fifo", "missing", "damaged"])
def test_weights_of_somebody_else_are_one_line(tmp_path: Path, kind: str) -> None:
    node = {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model": node}))
    if kind == "fifo":
        os.mkfifo(tmp_path / "model.safetensors")
    elif kind == "damaged":
        (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be loaded \(.*\); export it again$"):
        load_exported(tmp_path)


@pytest.mark.parametrize(
    "node", ["[", "{}", "[]", '{"model": {"_target_": "os.system"}}', "[" * 10**5, '{"model": 1}', '{"model": [1]}']
)
def test_a_configuration_of_somebody_else_builds_no_other_class(tmp_path: Path, node: str) -> None:
    (tmp_path / "config.json").write_text(node)
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read|os\.system, which is neither part"):
        load_exported(tmp_path)


@pytest.mark.parametrize("shape", [["", 8, 8], None, {}, [10**400]])
def test_arguments_of_another_type_are_one_line(tmp_path: Path, shape: object) -> None:
    node = {"_target_": "boltcutter.model.linear.Linear", "input_shape": shape, "num_classes": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model": node}))
    with pytest.raises(ConfigError, match=r"config\.json: cannot be loaded \(.*\); export it again$"):
        load_exported(tmp_path)
