"""The boundary of trust from outside: what somebody else has made is read in one way, and executes nothing."""

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from conftest import ROOT, run_command
from sources import FILES, SRC, in_one_process, nodes

from boltcutter.cli.commands import commands
from boltcutter.config.locate import locate

# What each command reads of a run folder. A new command must be added here, or to those that read none.
READ_RUNS = {
    "train": [["resume={run}"], ["reproduce={run}"], ["--print", "resume={run}"], ["--check", "resume={run}"]],
    "evaluate": [["run={run}"], ["--print", "run={run}"]],
    "predict": [["run={run}", "input=x"]],
    "export": [["run={run}", "export=onnx"]],
    "serve": [["run={run}", "port=0"]],
    "check": [["run={run}"]],
    "audit": [["run={run}"]],
    "doctor": [["run={run}"]],
    "launch": [
        *([verb, "run={run}"] for verb in ("status", "logs", "cancel", "fetch")),
        ["list", "runs={runs}"],
        ["launch=local", "resume={run}"],
        ["resume={run}"],
        ["launch=local", "resume={search}"],
    ],
    "search": [["resume={search}"], ["resume={search}", "worker=0"], ["--check", "resume={search}"]],
    "compare": [["run={run}", "with={run}"], ["--metric", "val/loss", "{run}", "{search}"]],
    "sync": [["run={run}"]],
    "info": [["run={run}"]],
    "why": [["run={run}", "--hang"]],
    "bisect": [["run={run}", "with={run}"]],
    "golden": [["run={run}"]],
    "runs": [["runs={runs}", "nothing=1"], ["runs={runs}", "--sort", "nothing"], ["remove", "{run}", "runs={runs}"]],
    "find-batch-size": [["resume={run}"]],
}
READ_NO_RUNS = {"bench", "new", "add", "vendor", "import", "mcp", "schema", "try", "tries"}  # mcp and try start others


RECORDS = {"record.json", "search.json", "RECORD", "SEARCH"}  # names and constants
READING = {"read_text", "read_bytes", "open", "loads", "load", "cat_file"}
# Where files are read by functions that could execute what they contain, or create far more than it. A further module
# must be added here, with a test that it cannot, as docs/threat_model.md lists them.
LOADERS = {
    # Files that this process has written, or a replay that it has started.
    "torch.load": {"boltcutter/strategy/process_launcher.py", "boltcutter/replay/traces.py"},
    "torch.export.load": {"boltcutter/export/runner.py"},  # signed
    "torch.serialization._open_zipfile_reader": {"boltcutter/checkpoint/unpickle.py"},
    # The last one of a file that this process has written.
    "zipfile.ZipFile": {
        *("boltcutter/checkpoint/load.py", "boltcutter/export/formats.py"),
        *("boltcutter/checkpoint/unpickle.py", "boltcutter/data/files.py", "boltcutter/model/keras_model.py"),
    },
    "tarfile.open": {"boltcutter/launch/bundle.py"},
    "onnxruntime.InferenceSession": {"boltcutter/export/runner.py"},
    "load_model": {"boltcutter/export/exported.py"},  # safetensors
    "JournalFileBackend": {"boltcutter/search/study.py"},  # JSON
    "ast.literal_eval": {"boltcutter/scaffold/port_script.py", "boltcutter/scaffold/source_code.py"},
    "runpy.run_path": {"boltcutter/scaffold/proof.py"},  # boltcutter import trains the original
    "yaml.load": {"boltcutter/config/values.py"},  # by a SafeLoader
    # Of limited size, and images by decoders that run no other program.
    "Image.open": {"boltcutter/data/image_io.py", "boltcutter/report/pixels.py"},
    "gzip.open": {"boltcutter/data/files.py", "boltcutter/launch/bundle.py"},
    "gzip.decompress": {"boltcutter/launch/kubernetes.py"},  # a file that this process has written
    "lzma.open": {"boltcutter/launch/bundle.py"},
    "pq.ParquetFile": {"boltcutter/data/table.py"},
    "np.load": {
        *("boltcutter/data/files.py", "boltcutter/export/serving/app.py"),
        "boltcutter/report/outcome_report.py",
    },
}
NEVER = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "yaml.unsafe_load",
    "exec",
    "eval",
    "os.system",
}
NEVER |= {
    "pd.read_pickle",
    "pd.read_parquet",
    "lzma.decompress",
    "bz2.open",
    "bz2.decompress",
    "torch.jit.load",
    "torch.hub.load",
    "marshal.loads",
    "shelve.open",
    "joblib.load",
    "os.popen",
}


def calls(among: Iterable[ast.AST]) -> Iterator[ast.Call]:
    return (node for node in among if isinstance(node, ast.Call))


@in_one_process
def test_records_are_read_by_one_reader() -> None:
    """No function that names the file of a record opens it in another way than by ``trust.read_json``."""
    found = set()
    for file in FILES:
        for function in nodes(file):
            if isinstance(function, ast.FunctionDef):
                inner = list(ast.walk(function))
                named = {node.value for node in inner if isinstance(node, ast.Constant)}
                named |= {node.id for node in inner if isinstance(node, ast.Name)}
                named |= {node.attr for node in inner if isinstance(node, ast.Attribute)}
                if named & RECORDS and {ast.unparse(call.func).rpartition(".")[2] for call in calls(inner)} & READING:
                    found.add(f"{file.relative_to(SRC)}:{function.name}")
    assert found == {  # which open another file
        "boltcutter/run/restart.py:check_start",  # of what it has just written
        "boltcutter/launch/node.py:check_starts",  # an object at a URL, parsed by trust.parse_json
        "boltcutter/search/trial.py:start",
        "boltcutter/replay/job.py:run",  # copied as it is, for a process that reads it so
    }


@in_one_process
def test_files_of_others_are_read_in_known_places() -> None:
    found: dict[str, set[str]] = {}
    for file in FILES:
        for call in calls(nodes(file)):
            found.setdefault(ast.unparse(call.func), set()).add(str(file.relative_to(SRC)))
    assert {name: found[name] for name in LOADERS} == LOADERS
    assert found.keys() & NEVER == set()
    for file in FILES:
        for call in calls(nodes(file)):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            if ast.unparse(call.func) == "np.load":
                assert given["allow_pickle"] == "False", file
            if ast.unparse(call.func) == "torch.load":
                assert given["weights_only"] == "True", file
            assert "trust_remote_code" not in given, file
            assert given.get("shell") != "True", file


@in_one_process
def test_digits_of_other_scripts_are_none() -> None:
    """Patterns name the digits, as ``\\d`` and ``isdigit`` also accept those which services and ``int`` do not."""
    for file in FILES:
        texts = {id(node.value): node for node in nodes(file) if isinstance(node, ast.Expr)}  # documentation
        for node in nodes(file):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
                rest = node.value.replace(r"[^\W\d_]", "")  # a letter of any script
                # Which columns are numbers in other scripts, so that they are no categories.
                assert "\\d" not in rest or file.name == "table.py", f"{file}:{node.lineno}"
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("isdigit", "isnumeric"), f"{file}:{node.lineno}"


def test_each_command_is_known_here() -> None:
    assert commands().keys() == READ_RUNS.keys() | READ_NO_RUNS


@pytest.mark.parametrize(
    "folders",
    [
        "target resolver",
        pytest.param("linked odd", marks=pytest.mark.slow),
        pytest.param("unchecked secret address composed chained", marks=pytest.mark.slow),
        pytest.param("fifo deep endless damaged damaged_inside", marks=pytest.mark.slow),
    ],
)
def test_no_command_executes_or_contacts_what_a_run_folder_names(tmp_path: Path, folders: str) -> None:
    command = [sys.executable, "tests/hostile_commands.py", str(tmp_path), json.dumps(READ_RUNS), folders]
    done = run_command(command, timeout=170, env={"PYTHONPATH": "tests", "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    each = len(found) // (1 + len(folders.split()))
    assert each == sum(map(len, READ_RUNS.values()))
    faults = [
        (what, status, error, events)
        for what, status, error, events, is_executed in found[each:]  # the first folder has no record
        if is_executed or events or status not in (1, 2) or not re.fullmatch(r"(note: .*\n)*error: .*\n", error)
    ]
    assert faults == []


def test_no_setting_of_a_launcher_holds_control_characters() -> None:
    """They are written to files that run, where a line end would begin another command."""
    count = 0
    for file in sorted((ROOT / "configs" / "launch").glob("*.yaml")):
        kind: Any = locate(yaml.safe_load(file.read_text())["_target_"])
        kinds = get_type_hints(kind.__init__)
        for field in (field for field in fields(kind) if field.init and re.search(r"\bstr\b", str(kinds[field.name]))):
            for text in ("a\nb", "a\rb", "a\x1bb", "a\u2028b"):
                values = {"dict": [{text: "x"}, {"A": text}], "list": [[text]]}
                for value in values.get(str(kinds[field.name]).partition("[")[0], [text]):
                    if field.name == "setup" and text == "a\nb":  # lines of shell
                        continue
                    with pytest.raises(ValueError, match=r"control character|not a|expected|is not|has no|no such"):
                        kind(**{field.name: value})
                    count += 1
    assert count > 400


def test_each_test_in_the_threat_model_exists() -> None:
    text = (ROOT / "docs" / "threat_model.md").read_text()
    model = text[text.index("## Files") :]
    rows = [line.strip("|").split("|") for line in model.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row[-1])
        assert named, row[0]
        assert [name for name in named if f"def {name}(" not in tests] == []
    paths = [ROOT / path for path in re.findall(r"tests/[\w/.]+", model)]
    assert [path for path in paths if not path.exists()] == []
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    run = "\n".join(file.read_text() for file in files)
    assert [name for name in re.findall(r"`(test_\w+)`", model) if f"def {name}(" not in run] == []
