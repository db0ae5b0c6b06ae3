import inspect
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import Script

from boltcutter.assembly.overrides import load_run_config
from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError
from boltcutter.config.redaction import find_secrets, redact
from boltcutter.environment import user_key
from boltcutter.project import Project
from boltcutter.run import folder, trust
from boltcutter.run import foreign_record as record
from boltcutter.run import foreign_references as references
from boltcutter.run.compare import compare

PROJECT = Project.find(__file__)


def refused(target: str, folder: Path = Path("/nowhere")) -> bool:
    try:
        trust.check_record({"a": [{"b": {"_target_": target}}]}, "run=x", folder, PROJECT)
    except ConfigError as error:
        return f"run=x: its record.json refers to {target}," in str(error) and "set trust=true" in str(error)
    return False


@pytest.mark.parametrize(
    "target",
    [
        "torch.nn.Linear",
        "torch.nn.functional.relu",
        "torch.optim.AdamW",
        "torch.optim.lr_scheduler.StepLR",
        "lightning.pytorch.callbacks.EarlyStopping",
        "pytorch_lightning.callbacks.EarlyStopping",
        "torchmetrics.classification.MulticlassAUROC",
        "boltcutter.model.mlp.MLP",
        "boltcutter.callback.checkpoint.BestCheckpoint",
        "torch.optim.lr_scheduler.ReduceLROnPlateau",
        "lightning.Trainer",
        "lightning.pytorch.strategies.DDPStrategy",
        "lightning.pytorch.loggers.TensorBoardLogger",
    ],
)
def test_known_classes_and_own_code_are_accepted(target: str) -> None:
    assert not refused(target)


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "subprocess.Popen",
        "builtins.eval",
        "runpy.run_path",
        "torch.load",
        "torch.hub.load",
        "torch.utils.cpp_extension.load_inline",
        "torch.nn.functional.torch.hub.load",
        "torch.nn.modules.module.torch.load",
        "torch.optim.adam.torch.load",
        "torchmetrics.metric.torch.load",
        "lightning.pytorch.cli.sys.exit",
        "boltcutter.run.lineage._git",
        "boltcutter.model.mlp.nn.modules.module.torch.load",
        "boltcutter.checkpoint.checkpoint_io.os.system",
        "pandas.eval",
        "numpy.load",
        "omegaconf.OmegaConf.load",
        "boltcutter.launch.slurm_queue._run",
        "boltcutter.run.snapshot.copy_code",
        "boltcutter.data.download.download_file",
        "lightning.pytorch.cli.LightningCLI",
        "pytorch_lightning.cli.LightningCLI",
        "pytorch_lightning.cli.sys.exit",
        "torch.nn.Module.apply",
        "torch.nn.modules.conv._ConvNd",
        "torchmetrics.BLEUScore",
        "torch.nn.parallel.parallel_apply",
        "torch.nn.modules.transformer.xavier_uniform_",
        "boltcutter.data.mapped._Pickler",
        "boltcutter.checkpoint.sharded_checkpoint._Unpickler",
        "torch.nn.utils._deprecation_utils.lazy_deprecated_import",
        "monai.bundle.ConfigWorkflow",
        "torchvision.datasets.lsun.LSUN",
        "conftest.run_command",
        "tests.conftest.run_command",
        "scripts.train.main",
        "boltcutter.model.mlp.nn.utils.prune.L1Unstructured",
        "torch.nnevil.Linear",
        "test.support.script_helper.assert_python_ok",
        "",
        "..",
    ],
)
def test_anything_else_is_refused(target: str) -> None:
    assert refused(target)


# One class of each package, none of which needs a configuration file of the project to be accepted.
KNOWN = """
    torch.nn.Linear torch.nn.functional.relu torch.nn.init.zeros_ torch.nn.utils.parametrizations.weight_norm
    torch.optim.Adam torch.optim.lr_scheduler.StepLR torch.optim.lr_scheduler.ReduceLROnPlateau torch.amp.GradScaler
    torch.optim.swa_utils.AveragedModel torch.distributed.fsdp.MixedPrecision torch.distributed.fsdp.OffloadPolicy
    torch.distributed.fsdp.MixedPrecisionPolicy torch.distributed.fsdp.CPUOffload torchmetrics.MeanMetric
    lightning.Trainer lightning.pytorch.Trainer lightning.pytorch.trainer.Trainer
    lightning.pytorch.callbacks.Timer lightning.pytorch.loggers.CSVLogger lightning.pytorch.strategies.DDPStrategy
    lightning.pytorch.profilers.SimpleProfiler lightning.pytorch.plugins.precision.MixedPrecision
    lightning.fabric.plugins.TorchCheckpointIO lightning.fabric.plugins.precision.Precision
    boltcutter.model.resnet.ResNet boltcutter.data.synthetic.Synthetic boltcutter.task.regression.Regression
    boltcutter.logger.csv_logger.CSVLogger boltcutter.strategy.ddp.DDPStrategy
    boltcutter.checkpoint.checkpoint_io.AtomicCheckpointIO boltcutter.data.tabular.Tabular
    boltcutter.callback.keras_file.KerasFile
    boltcutter.model.gpt.GPT boltcutter.strategy.fsdp.FSDPStrategy boltcutter.callback.qat.QAT
    boltcutter.launch.local.LocalLauncher boltcutter.model.linear.Linear boltcutter.data.digits.Digits
    boltcutter.task.classification.Classification boltcutter.callback.guard.Guard
"""


# Classes that read files by name or unpickle downloads, although they are in a package above.
LOADING = """
    torchmetrics.multimodal.clip_score.CLIPScore torchmetrics.text.bert.BERTScore
    torchmetrics.audio.dnsmos.DeepNoiseSuppressionMeanOpinionScore torchmetrics.functional.accuracy
    torchmetrics.image.arniqa.ARNIQA torchmetrics.image.dists.DeepImageStructureAndTextureSimilarity
    torchmetrics.image.fid.FrechetInceptionDistance torchmetrics.image.inception.InceptionScore
    torchmetrics.image.kid.KernelInceptionDistance torchmetrics.image.lpip.LearnedPerceptualImagePatchSimilarity
    torchmetrics.image.mifid.MemorizationInformedFrechetInceptionDistance
    torchmetrics.image.perceptual_path_length.PerceptualPathLength
"""


@pytest.mark.parametrize("target", KNOWN.split())
def test_classes_of_each_trusted_package_need_no_project(target: str) -> None:
    assert importable(target), "a path that cannot be imported is accepted, as nothing would be called"
    trust.check_record({"_target_": target}, "run=x", Path("/nowhere"))


def test_a_package_that_is_not_installed_executes_nothing() -> None:
    trust.check_record({"_target_": "torchmetrics.no_such_module.Metric"}, "run=x", Path("/nowhere"))


@pytest.mark.parametrize("target", LOADING.split())
def test_metrics_that_load_weights_are_refused(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert importable(target)
    monkeypatch.setattr(record, "_import_target", lambda name: pytest.fail(f"imports {name}"))
    assert refused(target)


def importable(target: str) -> bool:
    module, _, name = target.rpartition(".")
    return hasattr(import_module(module), name)


@pytest.mark.parametrize("folder", ["scripts", "tests", "hooks"])
def test_tools_of_a_project_are_no_code_of_a_configuration(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for name in (folder, "mine"):
        (tmp_path / name / f"code_in_{name}").mkdir(parents=True)
        (tmp_path / name / f"code_in_{name}" / "__init__.py").write_text("class Net: ...\n")
        monkeypatch.syspath_prepend(tmp_path / "link" / name)
    for root in (tmp_path, tmp_path / "link"):
        mine, project = Project.at(root, "code_in_mine"), Project.at(root, f"code_in_{folder}")
        trust.check_record({"_target_": "code_in_mine.Net"}, "run=x", Path("/nowhere"), mine)
        with pytest.raises(ConfigError, match=rf"refers to code_in_{folder}\.Net"):
            trust.check_record({"_target_": f"code_in_{folder}.Net"}, "run=x", Path("/nowhere"), project)


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "torch.nn.Linear", "_check_": False, "in_features": "x"},
        {"_target_": "lightning.fabric.utilities.data._ClassReplacementContextManager", "base_cls": "os"},
        {"_target_": "torchmetrics.multimodal.CLIPScore"},
        {"_target_": "torchmetrics.image.fid.FrechetInceptionDistance"},
        {"_target_": "lightning.pytorch.demos.boring_classes.BoringModel"},
        {"_target_": "torch.nn.utils.prune.L1Unstructured"},
        {"checkpoints": "reference://?fo=https://example.org/x.json"},
        {"checkpoints": "simplecache::https://example.org/x"},
        {"checkpoints": "simplecache::s3://bucket/x"},
        {"checkpoints": "simplecache::/x"},
        {"https://example.org/x": 1},
        {"data": {"path": ["https://example.org/x"]}},
        {"a": "x http://169.254.169.254/latest/meta-data"},
        {"a": "${protocol}://example.org", "protocol": "https"},
        {"a": "${begin}${end}", "begin": "https:", "end": "//example.org"},
        {"a": ["${oc.env:NOT_SET,https:}//example.org"]},
        {"_target_": "a\nerror: b"},
        {"checkpoints": "https://example.org/\nerror: b"},
        {"a": "${oc.create:\nb}"},
    ],
    ids=str,
)
def test_unchecked_arguments_and_other_addresses_are_refused(node: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^run=x: its record\.json .*; set trust=true") as error:
        trust.check_record({**node, "b": node}, "run=x", Path("/nowhere"), PROJECT)
    assert "\n" not in str(error.value)


def test_storage_and_addresses_of_the_project_are_accepted() -> None:
    protocols = ("s3", "S3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "file")
    for text in ("gs://bucket/a b", *(f"{protocol}://bucket/runs" for protocol in protocols)):
        trust.check_record({"checkpoints": text}, "run=x", Path("/nowhere"), PROJECT)
    trust.check_record(compose(PROJECT, ["data=mnist", "data.folder=x"]).written, "run=x", Path("/nowhere"), PROJECT)


def test_a_record_that_changes_between_two_readings_is_verified_as_it_is_used(
    untrusted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO gives another content to each reader."""
    evil = json.loads((untrusted / "record.json").read_text())
    good = evil | {"config": {"name": "a", "runs": "runs"}}
    good["signature"] = user_key.sign(good["config"])
    readings = iter([evil, good, good])
    monkeypatch.setattr(folder, "read_record", lambda place: next(readings))
    with pytest.raises(ConfigError, match=r"refers to os\.mkdir"):
        load_run_config(PROJECT, untrusted)


def test_a_comparison_does_not_contact_what_a_stranger_names(untrusted: Path) -> None:
    record = json.loads((untrusted / "record.json").read_text())
    record["config"] = {"name": "a", "runs": "runs", "checkpoints": "https://example.org/${oc.env:HOME}"}
    (untrusted / "record.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="reads your environment"):
        compare(PROJECT, [f"run={untrusted}", f"with={untrusted}"])


def test_a_variable_of_the_project_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "private_variables", {"HARMLESS"})  # of its .env
    with pytest.raises(ConfigError, match="reads a secret"):
        trust.check_record({"a": "s3://bucket/${oc.env:HARMLESS}"}, "run=x", tmp_path, PROJECT)


def test_the_environment_is_read_only_where_a_file_of_the_project_does(tmp_path: Path) -> None:
    (tmp_path / "configs" / "data").mkdir(parents=True)
    lines = "folder: ${oc.env:DATA_ROOT,/data}/images\nplace: ${oc.env:SERVER}\n"
    (tmp_path / "configs" / "data" / "own.yaml").write_text(lines)
    project = Project.at(tmp_path)
    own = {"folder": "${oc.env:DATA_ROOT,/data}/images", "place": "${oc.env:SERVER}"}
    trust.check_record(
        {"data": own, "task": {"place": "${data.place}"}, "trainer": {"n": "${data.folder}"}}, "x", tmp_path, project
    )
    for node in (
        {"a": "${oc.env:PIP_INDEX_URL}"},
        {"data": {"folder": "s3://theirs/${oc.env:PIP_INDEX_URL}"}},
        {"data": {"url": own["folder"]}},  # under another key
        {"data": {**own, "url": "s3://theirs/${data.folder}"}},
        {"data": {**own, "url": "s3://theirs/${.place}"}},
        {"data": own, "x": "${data.place}", "y": {"z": ["s3://theirs/${x}"]}},
        {"data": own, "x": "${data}", "y": "s3://theirs/${x.place}"},
        {"data": own, "x": "${begin}${data.place}", "begin": "s3://theirs/"},
        {"data": own, "x": "s3://theirs/${data.${name}}", "name": "place"},
    ):
        with pytest.raises(ConfigError, match=r"of your environment|reads your environment"):
            trust.check_record(node, "run=x", tmp_path, project)


@pytest.mark.parametrize("kind", ["file", "folder", "chain", "fifo"])
def test_a_folder_that_leads_elsewhere_is_refused(untrusted: Path, kind: str) -> None:
    """Logs would be appended to a link's target, and its content would be shown in reports."""
    record = json.loads((untrusted / "record.json").read_text())
    config = dict.fromkeys(folder.REQUIRED) | {"name": "a", "runs": "runs"}
    (untrusted / "record.json").write_text(json.dumps(record | {"config": config}))
    (untrusted / "logs").mkdir()
    (untrusted / "logs" / "inside").symlink_to("../record.json")
    (untrusted / "logs" / "itself").symlink_to("itself")  # leads nowhere
    load_run_config(PROJECT, untrusted)
    place = untrusted / "logs" / "rank0.log"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "chain":
        place.symlink_to("next")
        (untrusted / "logs" / "next").symlink_to("../../outside")
    else:
        place.symlink_to(untrusted.parent / "outside" if kind == "file" else "..", target_is_directory=True)
        if kind == "folder":
            place.unlink()
            place.symlink_to("../..")
    with pytest.raises(ConfigError, match=r"run=.*: logs/\w+(\.log)? is not a file of the folder, or leads out of it"):
        load_run_config(PROJECT, untrusted)


@pytest.mark.timeout(60)
def test_references_that_multiply_are_refused(tmp_path: Path) -> None:
    doubling = {f"x{n}": f"${{x{n - 1}}}" * 2 for n in range(1, 40)} | {"x0": "a"}
    lists = {f"x{n}": [f"${{x{n - 1}}}"] * 2 for n in range(1, 40)} | {"x0": "a"}
    for multiplying in (doubling, lists):
        with pytest.raises(ConfigError, match=r"has references which multiply, as in x[0-9.]+; set trust=true"):
            trust.check_record(multiplying, "run=x", tmp_path)
    trust.check_record({f"x{n}": f"${{x{n - 1}}}" for n in range(1, 40)} | {"x0": "a"}, "run=x", tmp_path)
    trust.check_record({"a": "", "b": "${a}" * 1000, "c": ["${a}${a}"] * 1000}, "run=x", tmp_path)  # these do not
    trust.check_record(
        {f"x{n}": "${y.a}-${y.b}" for n in range(100)} | {"y": {"a": "a", "b": "${z}", "z": 1}}, "x", tmp_path
    )
    for node in (
        {"a": "x" * 2**20, "b": "${a}" * 17},
        {"x": {"a": "${y}${y}", "b": "x" * 2**20}, "y": [f"${{x.b}}{n}" for n in range(20)]},
        {"a": "${b}${b}", "b": "${a}" * 40},
        {"a": "${.b}" * 2, "b": "${..c}" * 2, "c": "x" * 2**23},
    ):
        with pytest.raises(ConfigError, match="which multiply"):
            trust.check_record(node, "run=x", tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text",
    [
        *(
            "x" * 10**5,
            "x-" * 10**5,
            "a://" * 10**5,
            "${oc.env:A," + " " * 10**5,
            "${" + " " * 10**5,
            "sk-" * 10**5 + "é",
        ),
        *(
            "${" * 10**4 + "a" + "}" * 10**4,
            "${a}" * 10**5,
            "${a.b" * 10**5,
            "x" * 10**5 + "${a}",
            "[" * 10**5,
            "A" * 10**5,
        ),
        "A=" * 10**5,
    ],
    ids=lambda text: text[:12].strip(),
)
def test_a_long_text_takes_little_time(text: str) -> None:
    began = time.process_time()
    node = {"a": "", "b": text}
    with suppress(ConfigError):
        trust.check_record(node, "run=x", Path("/nowhere"), PROJECT)
    assert redact(node, node).keys() == node.keys()
    assert len(list(find_secrets(node))) <= 1
    assert time.process_time() - began < 3


@pytest.mark.parametrize("target", [3, None, ["os.system"], {"a": 1}])
def test_a_target_that_is_no_text_is_refused(target: Any) -> None:
    with pytest.raises(ConfigError, match="set trust=true"):
        trust.check_record({"_target_": target}, "run=x", Path("/nowhere"), PROJECT)


def test_whether_arguments_are_checked_is_not_a_reference() -> None:
    node = {"_target_": "torch.nn.Linear", "_check_": "${off}", "off": False}
    with pytest.raises(ConfigError, match=r"refers to torch\.nn\.Linear"):
        trust.check_record(node, "run=x", Path("/nowhere"), PROJECT)


def test_links_of_the_code_are_no_links_of_the_run(tmp_path: Path) -> None:
    """Nothing reads those in the copy of the code and in the folder of W&B."""
    (outside := tmp_path / "outside").write_text("")
    for name in ("code", "wandb", "logs/code"):
        (tmp_path / "run" / name).mkdir(parents=True)
    for name in ("code", "wandb"):
        (tmp_path / "run" / name / "link").symlink_to(outside)
    (tmp_path / "run" / "inside").symlink_to("logs")
    (tmp_path / "another").symlink_to("run")
    for place in ("run", "another"):
        trust.check_record({}, "run=x", tmp_path / place, walks=True)
    (tmp_path / "run" / "logs" / "code" / "a\nerror: b").symlink_to(outside)
    trust.check_record({"_target_": "os.system"}, "run=x", tmp_path / "run", instantiates=False)  # none is followed
    with pytest.raises(ConfigError, match=r"logs/code/a error: b is not a file of the folder") as error:
        trust.check_record({}, "run=x", tmp_path / "run", walks=True)
    assert "\n" not in str(error.value)


def constructors() -> Iterator[type]:
    """The classes that a record of somebody else may instantiate."""
    for name in record.TRUSTED_PACKAGES:
        package = import_module(name) if name.islower() else None
        for info in walk_packages(getattr(package, "__path__", ()), f"{name}."):
            with suppress(ImportError):  # of a package that is not installed
                import_module(info.name)
    found = [module for key, module in sys.modules.items() if key.startswith(record.TRUSTED_PACKAGES) and module]
    for module in found:
        for name, value in vars(module).items():
            if isinstance(value, type) and record._is_known(f"{module.__name__}.{name}"):
                yield value


def test_no_allowed_constructor_imports_executes_or_unpickles() -> None:
    calls = re.compile(r"\b(import_module|__import__|exec|eval|read_text|(torch|pickle|np|joblib)\.load|open)\(")
    kinds = set(constructors())
    assert len(kinds) > 400
    found = {}
    for kind in kinds:
        for name in ("__init__", "__new__", "__post_init__"):
            with suppress(AttributeError, TypeError, OSError):  # there is none, or it is written in C
                if match := calls.search(inspect.getsource(getattr(kind, name))):
                    found[f"{kind.__module__}.{kind.__qualname__}"] = match[0]
    assert found == {}


def test_own_code_is_accepted_but_not_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_code.py").write_text("import os, subprocess, sys\nclass Net: ...\ndef make_net(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not refused("my_code.Net")
    assert not refused("my_code.make_net")
    for name in ("subprocess.run", "os.system", "sys.path.insert", "os.environ.clear"):
        assert refused(f"my_code.{name}")


def test_what_a_trusted_module_imports_or_hides_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Callable:
        def __call__(self) -> None: ...

    def public() -> None: ...

    def place(name: str, value: Any, module: str, **facts: str) -> str:
        for key, fact in ({"__module__": module} | facts).items():
            setattr(value, key, fact)
        where, _, attribute = name.rpartition(".")
        monkeypatch.setattr(import_module(where), attribute, value, raising=False)
        record._import_target.cache_clear()
        return name

    functional = "torch.nn.functional"
    facts = {"__qualname__": "public", "__name__": "public"}
    assert not refused(place(f"{functional}.made_up", public, functional, **facts))
    assert refused(place(f"{functional}.made_up", public, functional, **facts | {"__qualname__": "Owner.public"}))
    assert refused(place(f"{functional}.made_up", public, functional, **facts | {"__name__": "_private"}))
    assert refused(place(f"{functional}.made_up", public, "torch.nn.modules.made_up", **facts))
    assert refused(place(f"{functional}.made_up", Callable(), functional, **facts))
    kind = type("Net", (torch.nn.Module,), {})
    assert not refused(place("torch.nn.MadeUp", kind, "torch.nn.modules.made_up"))
    assert refused(place("torch.nn.MadeUp", kind, "another_package"))


def test_own_code_that_cannot_be_imported_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is reported where it is used, and nothing can be called."""
    (tmp_path / "my_broken_code.py").write_text("raise ValueError")
    (tmp_path / "my-code.py").write_text("class Net: ...")  # no name of a module
    (tmp_path / "my_program.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    assert not refused("my_broken_code.Net")
    assert not refused("my_program.Net")
    assert refused("my-code.Net")
    monkeypatch.setitem(sys.modules, "without_spec", ModuleType("without_spec"))
    assert refused("without_spec.Net")
    (module := ModuleType("without_origin")).__spec__ = ModuleSpec("without_origin", None)
    monkeypatch.setitem(sys.modules, "without_origin", module)
    assert refused("without_origin.Net")


def test_a_run_folder_inside_a_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my_package" / "runs" / "one"
    folder.mkdir(parents=True)
    (tmp_path / "my_package" / "__init__.py").write_text("")
    (tmp_path / "my_package" / "net.py").write_text("class Net: ...")
    (folder / "evil.py").write_text("raise AssertionError('was imported')")
    (link := tmp_path / "link").symlink_to(folder)
    monkeypatch.syspath_prepend(tmp_path)
    for place in (folder, link):
        assert refused("my_package.runs.one.evil.Evil", place)
        assert not refused("my_package.net.Net", place)
    (folder / "out").symlink_to(tmp_path)  # by somebody else
    (tmp_path / "linked_package").mkdir()
    (tmp_path / "linked_package" / "__init__.py").write_text("")
    (tmp_path / "linked_package" / "runs").symlink_to(folder.parent)  # by the user
    assert refused("linked_package.runs.one.evil.Evil", folder)
    assert refused("linked_package.runs.one.out.my_package.net.Net", folder)
    assert not refused("linked_package.runs.two.net.Net", folder)


def test_a_package_of_the_system_is_not_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("python3/dist-packages", "python3/site-packages", "mine"):
        (tmp_path / place / "in_two_folders").mkdir(parents=True)
        (tmp_path / place / f"of_{Path(place).name[:4]}.py").write_text("def read(path): ...\n")
        monkeypatch.syspath_prepend(tmp_path / place)
    assert not refused("of_mine.read")
    for name in ("of_dist", "of_site", "in_two_folders"):
        assert refused(f"{name}.read")
    for name in ("purelib", "platlib", "stdlib"):  # under any name, also of a link
        (place := tmp_path / f"of_{name}").mkdir()
        (tmp_path / name).symlink_to(place)
        (place / f"in_{name}.py").write_text("def read(path): ...\n")
        monkeypatch.syspath_prepend(place)
        assert not refused(f"in_{name}.read")
        with monkeypatch.context() as patch:
            patch.setattr(sysconfig, "get_path", lambda path, name=name: str(tmp_path / (path * (path == name) or "x")))
            assert refused(f"in_{name}.read")


@pytest.mark.parametrize(
    "text",
    [
        "${oc.create:{x: {_target_: os.system, command: id}}}",
        "${oc.decode:${payload}}",
        "${oc.decode:${oc.env:NOT_SET,${payload}}}",
        "${oc.decode:${oc.env:NOT_SET,'{_target_: os.system}'}}",
        "${oc.${name}:{_target_: os.system}}",
        "s3://bucket/${oc.env:AWS_SECRET_ACCESS_KEY}",
        "https://host/${oc.env:AWS_SECRET_ACCESS_KEY}",
        "https://host/${oc.env :AWS_SECRET_ACCESS_KEY}",
        "https://host/${oc.env:${name}}",
    ],
)
def test_a_reference_that_makes_a_call_or_reads_a_secret_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set trust=true"):
        trust.check_record({"callback": {"a": [text]}}, "run=x", tmp_path, PROJECT)


def test_references_to_keys_and_variables_are_accepted(tmp_path: Path) -> None:
    for text in (
        "${model}",
        "${a.${b}.c-d}",
        "${..lr}",
        "${runs}/${name}/<id>",
    ):
        trust.check_record({"a": text}, "run=x", tmp_path, PROJECT)
    trust.check_record({"num_nodes": "${oc.decode:${oc.env:BOLTCUTTER_NODES,1}}"}, "run=x", tmp_path, PROJECT)


@pytest.mark.parametrize("trainer", ["default", "ddp", "mpi", "horovod"])
def test_a_configuration_of_the_project_is_accepted_unsigned(tmp_path: Path, trainer: str) -> None:
    trust.check_record(compose(PROJECT, [f"trainer={trainer}", "launch=slurm"]).written, "run=x", tmp_path, PROJECT)


def test_a_module_in_the_run_folder_is_refused_without_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "theirs" / "one"
    folder.mkdir(parents=True)
    (folder / "evil.py").write_text("raise AssertionError('was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert refused("theirs.one.evil.Evil", folder)
    monkeypatch.syspath_prepend(folder)
    assert refused("evil.Evil", folder)
    with pytest.raises(ConfigError, match=r"refers to evil\.Evil"):  # also below the project, as runs usually are
        trust.check_record({"_target_": "evil.Evil"}, "run=x", folder, Project.at(tmp_path))


def test_a_module_beside_the_run_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes any folder on its path for a package, such as that of all runs."""
    folder = tmp_path / "some_runs" / "theirs" / "one"
    folder.mkdir(parents=True)
    (folder.parent / "evil.py").write_text("raise AssertionError('was imported')")
    for place in ("some_code", "elsewhere/some_runs"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "net.py").write_text("class Net: ...")
    monkeypatch.syspath_prepend(tmp_path)
    assert refused("some_runs.theirs.evil.Evil", folder)
    trust.check_record({"_target_": "some_code.net.Net"}, "run=x", folder)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")  # now it is of two folders
    assert refused("some_runs.theirs.evil.Evil", folder)


@pytest.mark.parametrize("place", ["runs/a/one", "mine/a/one", "mine", "package/a", "data/downloads"])
def test_a_module_in_another_folder_of_data_is_refused_without_import(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of one run may name a module in the folder of another, which is somebody else's as well."""
    (folder := tmp_path / "project" / place / "evil").mkdir(parents=True)
    (folder / "net.py").write_text("raise AssertionError('was imported')")
    if place != "data/downloads":
        (folder.parent / "record.json").write_text("{}")
    if place == "package/a":
        (folder.parents[1] / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "project")
    target = ".".join((*place.split("/"), "evil", "net", "Net"))
    with pytest.raises(ConfigError, match=f"refers to {target}"):
        trust.check_record({"_target_": target}, "run=x", tmp_path / "elsewhere", Project.at(tmp_path / "project"))


@pytest.mark.parametrize("place", ["corpora", "outputs/sub", "logs", "."])
def test_a_module_beside_data_is_no_code_of_the_project(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its package, the modules that its configuration files name, and what git tracks."""
    root = tmp_path / "project"
    (folder := root / place).mkdir(parents=True)
    for name in ("beside", "tracked", "named"):
        (folder / f"{name}_{tmp_path.name}.py").write_text("class Net: ...\n")
    monkeypatch.syspath_prepend(root)
    path = "" if place == "." else place.replace("/", ".") + "."
    beside, tracked, named = (f"{path}{name}_{tmp_path.name}.Net" for name in ("beside", "tracked", "named"))
    (root / "configs" / "model").mkdir(parents=True)
    (root / "configs" / "model" / "own.yaml").write_text(f"_target_: {named}\n")
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", f"{place}/tracked_{tmp_path.name}.py"]):
        subprocess.run([*git, *words], check=True, timeout=20)
    project = Project.at(root, "package")
    for target in (tracked, named, f"{named[:-4]}.Other"):
        trust.check_record({"_target_": target}, "run=x", Path("/nowhere"), project)
    with pytest.raises(ConfigError, match=rf"refers to {beside}"):
        trust.check_record({"_target_": beside}, "run=x", Path("/nowhere"), project)
    assert f"beside_{tmp_path.name}" not in str(sys.modules.keys())


def test_the_copy_of_the_code_in_a_run_folder_is_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, root = tmp_path / "run", tmp_path / "run" / "code"  # which a launcher has created
    for place, name in ((root, "in_the_copy"), (folder, "beside_the_copy"), (tmp_path / "lib", "in_a_library")):
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.py").write_text("class Net: ...\n")
        monkeypatch.syspath_prepend(place)
    for name in ("in_the_copy", "in_a_library"):
        trust.check_record({"_target_": f"{name}.Net"}, "run=x", folder, Project.at(root))
    with pytest.raises(ConfigError, match=r"refers to beside_the_copy\.Net"):
        trust.check_record({"_target_": "beside_the_copy.Net"}, "run=x", folder, Project.at(root))
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path.parent)
    with pytest.raises(ConfigError, match=r"\.run\.beside_the_copy\.Net"):
        trust.check_record({"_target_": f"{tmp_path.name}.run.beside_the_copy.Net"}, "run=x", folder, Project.at(root))
    with pytest.raises(ConfigError, match=r"refers to in_the_copy\.Net"):
        trust.check_record({"_target_": "in_the_copy.Net"}, "run=x", folder, Project.at(tmp_path / "lib"))


def test_targets_in_configuration_files_of_the_project_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "configs" / "model").mkdir(parents=True)
    (tmp_path / "configs" / "model" / "own.yaml").write_text("_target_: pandas.DataFrame\n")
    (tmp_path / "configs" / "model" / "old.yaml").write_text("_target_: pytorch_lightning.cli.LightningCLI\n")
    for target in ("pandas.DataFrame", "pytorch_lightning.cli.LightningCLI"):
        trust.check_record({"_target_": target}, "run=x", tmp_path, Project.at(tmp_path))


@pytest.fixture
def untrusted(tmp_path: Path) -> Path:
    """The folder of a run whose record would create a folder when it is opened."""
    evil = {"_target_": "os.mkdir", "path": str(tmp_path / "evil")}
    record = {"id": "a", "name": "a", "config": {"data": evil, "runs": "runs", "name": "a"}, "attempts": []}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.json").write_text(json.dumps(record))
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("train", ["resume={}"]),
        ("train", ["reproduce={}"]),
        ("evaluate", ["run={}"]),
        ("predict", ["run={}", "input=x"]),
        ("check", ["run={}"]),
    ],
)
def test_an_untrusted_folder_is_not_executed(script: Script, untrusted: Path, name: str, overrides: list[str]) -> None:
    done = script(name, *(override.format(untrusted) for override in overrides))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "refers to os.mkdir" in done.stderr
    assert "set trust=true" in done.stderr
    assert not (untrusted.parent / "evil").exists()


def test_a_reference_that_cannot_be_parsed_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"correct the reference$") as error:
        trust.check_record({"model": {"a": "${data.shape...x}"}}, "run=x", tmp_path, PROJECT)
    assert "\n" not in str(error.value)
