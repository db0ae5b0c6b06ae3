import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from compared_runs import write_run
from conftest import require

from boltcutter.assembly.assemble import read_config
from boltcutter.cli import mcp_server
from boltcutter.cli.mcp_server import Tools, as_text, mcp_command
from boltcutter.config.compose import refuse_duplicates
from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.run.folder import read_record

ROOT = Path(__file__).parents[2]
SERVER = """  # mcp_command, with a server that runs one tool
import asyncio, sys, types
from pathlib import Path
class MCPServer:
    def __init__(self, *_, **__): self.tools = {}
    def tool(self): return lambda tool: self.tools.setdefault(tool.__name__, tool)
    def run(self, _): asyncio.run(self.tools[sys.argv[2]](sys.argv[3:]))
for name in ("mcp", "mcp.server", "mcp.server.mcpserver"): sys.modules[name] = types.ModuleType(name)
sys.modules["mcp.server.mcpserver"].MCPServer = MCPServer
from boltcutter.project import Project
from boltcutter.cli.mcp_server import mcp_command
mcp_command(Project.at(Path(sys.argv[1])), [])
"""
COMMAND = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path("ended").touch(), os._exit(0)))
pathlib.Path("begun").touch()
time.sleep(300)
"""


def test_the_command_takes_no_arguments() -> None:
    with pytest.raises(ConfigError, match=r"^model=mlp: mcp takes no such argument; remove it$"):
        mcp_command(Project.find(ROOT), ["model=mlp"])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    with pytest.raises(ConfigError, match=r"^mcp: not installed.*pip install"):
        mcp_command(Project.find(ROOT), [])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "argument",
    ["--html=/tmp/x", "--live", "-h", "trust=true", "++trust=true", "a\nb", "a\0", "\ud800", "x" * 200_000],
    ids=range(9),
)
def test_an_agent_passes_no_options_and_no_trust(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "create_subprocess_exec", None)  # nothing is started
    tools = Tools(ROOT)
    calls = [tools.list_runs(argument), tools.compare("val/loss", ["a", argument]), tools.check([argument])]
    for call in (*calls, tools.train([argument]), tools.train([], float("nan")), tools.train([], -1)):
        found = asyncio.run(call)
        assert (found["ok"], found["errors"][0]["code"]) == (False, "failed")


@pytest.mark.timeout(60)
def test_runs_are_sorted_with_the_worst_first(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.boltcutter]\n")
    for number, accuracy in enumerate((0.5, 0.9, 0.2)):
        write_run(tmp_path / "runs" / "digits" / f"2026010{number}-120000-abcd123{number}", accuracy)
    found = asyncio.run(Tools(tmp_path).list_runs(sort="-test/accuracy"))
    assert found["ok"], found
    assert [run["metrics"]["test/accuracy"] for run in found["result"]] == [0.2, 0.5, 0.9]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_commands_end_with_a_server_that_a_client_ends(number: int, tmp_path: Path) -> None:
    (tmp_path / "boltcutter.py").write_text(COMMAND)  # in place of the library
    with subprocess.Popen([sys.executable, "-c", SERVER, str(tmp_path), "check"], cwd=ROOT) as server:
        while not (tmp_path / "begun").exists():
            assert server.poll() is None
            time.sleep(0.1)
        server.send_signal(number)
        assert server.wait() == 128 + number
    while not (tmp_path / "ended").exists():
        time.sleep(0.1)


def test_a_command_that_starts_at_the_moment_of_a_signal_ends_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    tools, found = Tools(ROOT), list[Any]()

    async def start(*_: Any, **__: Any) -> Any:
        tools.end(signal.SIGINT, None)
        assert found == []
        return SimpleNamespace(pid=7)

    def leave(status: int) -> None:
        found.append(status)
        raise SystemExit

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(mcp_server, "_signal", lambda *given: found.append(given))
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit):
        asyncio.run(tools.check([]))
    assert found == [(7, signal.SIGTERM), 128 + signal.SIGINT]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no parent-death signal")
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_training_saves_and_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.boltcutter]\n")
    overrides = ["folder=run", "model=linear", "trainer.max_epochs=9999", "trainer.accelerator=cpu"]
    with subprocess.Popen([sys.executable, "-c", SERVER, str(tmp_path), "train", *overrides], cwd=ROOT) as server:
        while not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists():  # after an epoch
            assert server.poll() is None
            time.sleep(0.1)
        server.kill()
    end = time.monotonic() + 60
    while (attempt := read_record(tmp_path / "run")["attempts"][-1])["reason"] == "running":
        if time.monotonic() > end:
            os.kill(attempt["pid"], signal.SIGKILL)
            pytest.fail("the training goes on")
        time.sleep(0.1)
    assert attempt["reason"].startswith("preempted by SIGTERM, saved")


@pytest.mark.timeout(60)
def test_a_command_ends_at_its_time_limit() -> None:
    found = asyncio.run(Tools(ROOT, limit=0.05, grace=10).run("check"))
    assert (found["ok"], found["errors"][0]["code"]) == (False, "failed")
    assert "0.05 s" in found["errors"][0]["message"]


def test_the_report_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [{"id": name, "folder": str(tmp_path / name)} for name in ("2026-a", "2026-b")]
    (tmp_path / "2026-b").mkdir()
    (tmp_path / "2026-b" / "report.html").write_text("<style>x</style><h1>Run</h1><table><tr><td>a<td>1 &lt; 2</tr>")
    tools = Tools(ROOT)

    async def run(*arguments: str) -> dict[str, object]:
        return {"ok": True, "result": runs}

    monkeypatch.setattr(tools, "run", run)
    assert asyncio.run(tools.read_report("latest"))["text"] == "Run\na 1 < 2"
    assert asyncio.run(tools.read_report("b"))["ok"]
    runs.append({"id": "2026-b/0000", "parent": "2026-b", "folder": str(tmp_path / "trial")})
    assert asyncio.run(tools.read_report("latest"))["ok"]
    assert asyncio.run(tools.read_report("2026-a"))["errors"][0]["message"].startswith("run=2026-a: has no report")
    assert asyncio.run(tools.read_report("../etc"))["errors"][0]["code"] == "unknown_run"


def test_a_report_of_somebody_else_is_no_link_and_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: str) -> dict[str, Any]:
        return {"ok": True, "result": [{"id": "a", "folder": str(tmp_path)}]}

    tools, report = Tools(tmp_path), tmp_path / "report.html"
    monkeypatch.setattr(tools, "run", run)
    (tmp_path / "secret").write_text("a secret")
    report.symlink_to("secret")
    assert asyncio.run(tools.read_report("a"))["errors"][0]["message"].startswith("run=a: has no report")
    report.unlink()
    report.touch()
    os.truncate(report, 1 << 40)
    assert "its report cannot be read" in asyncio.run(tools.read_report("a"))["errors"][0]["message"]
    report.write_text("<" * 10**6 + "<svg" * 10**5)
    signal.alarm(30)
    assert asyncio.run(tools.read_report("a"))["ok"]
    signal.alarm(0)


@pytest.mark.parametrize(("overrides", "tests"), [(["model=mlp"], False), (["test=true"], True)])
def test_training_has_a_time_limit_and_leaves_out_the_test_split(
    overrides: list[str], tests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = Tools(ROOT, grace=60)

    async def run(*arguments: str, seconds: float) -> dict[str, object]:
        return {"arguments": arguments, "seconds": seconds}

    monkeypatch.setattr(tools, "run", run)
    found = asyncio.run(tools.train(overrides, minutes=90))
    assert found["seconds"] == 90 * 60 + 60
    refuse_duplicates(found["arguments"])
    cfg = read_config(Project.find(ROOT), list(found["arguments"][1:]))
    assert (cfg.test, cfg.trainer["max_time"]) == (tests, "00:01:30:00")


def test_reports_as_text() -> None:
    assert as_text("<head>a</head><p>b\nc</p><script>d</script><tr><td>1</td><td>2</td></tr>") == "b c\n1 2"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_client_lists_the_tools_and_repairs_a_mistake() -> None:
    require(package="mcp", install="pip install 'boltcutter[mcp]'")
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    arguments = ["-m", "boltcutter", "mcp"]
    server = StdioServerParameters(command=sys.executable, args=arguments, cwd=ROOT, env={**os.environ})

    async def repair() -> None:
        async with Client(stdio_client(server)) as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == {
                *("list_runs", "compare", "check", "train", "try_change", "tries", "read_report")
            }
            done = await client.call_tool("check", {"overrides": ["model=nlp"]})
            found = json.loads(done.content[0].text)
            assert (found["exit_status"], found["errors"][0]["fix"]) == (2, "model=mlp")
            done = await client.call_tool("check", {"overrides": [found["errors"][0]["fix"]]})
            assert json.loads(done.content[0].text)["output"] == ["ok"]

    asyncio.run(repair())
