"""A value of each kind of secret, and a search for it in all that commands print and write."""

import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from conftest import environment, patience

VARIABLES = {
    "OPENAI_API_KEY": "canary-usual-0123456789",
    "API_KEY_PROD": "canary-odd-name-0123456789",
    "MY_SERVICE_KEY": "canary-service-0123456789",
    "PGPASSWORD": "canary-pgpassword-0123456789",
    "PIP_INDEX_URL": "https://user:canary-index-0123456789@example.com/simple",
}
PRIVATE = {"SITE_LOGIN": "canary-private-login", "HF_TOKEN": "canary-private-token-0123456789"}
KNOWN_FORM = "hf_canaryCANARYcanaryCANARYcanaryCANARY"
LITERAL = "canary-literal-0123456789"
URL = "https://user:canary-in-url@example.com/a?sig=canary-signature"
MODULE = '''
import logging, os, sys, warnings
import boltcutter
from boltcutter.data.digits import Digits
from lightning.pytorch.callbacks import Callback

NAMES = [*{names!r}]


def everything():
    return " ".join([*(os.environ[name] for name in NAMES), {form!r}, {url!r}])


class Data(Digits):
    """Digits, whose module reads and prints all secrets."""

    def load(self):
        print("data from", everything())
        warnings.warn(f"slow: {{everything()}}", stacklevel=1)
        logging.getLogger("canary").warning("connecting with %s", everything())
        return super().load()


class Client(Callback):
    """A client of a service.

    Args:
        api_key: Its key.
            url: Its address.
        fails: Whether it fails.
    """

    def __init__(self, api_key: str, url: str = "", fails: bool = False) -> None:
        self.api_key, self.fails = api_key, fails

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.fails:
            raise ConnectionError(f"401 for {{self.api_key}} {{everything()}}")

    def on_train_start(self, trainer, pl_module):
        print("client", self.api_key, file=sys.stderr)
'''
SETTINGS = """# With a client.
defaults: default
client:
  _target_: canary.Client
  api_key: ${oc.env:OPENAI_API_KEY}
  url: ${oc.env:PIP_INDEX_URL}
"""
LOOSE = re.compile(rb"canary-[\w-]+|hf_canary\w*", re.I)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    texts = {
        "pyproject.toml": '[tool.boltcutter]\npackage = "canary"\n',
        "src/canary/__init__.py": MODULE.format(names=[*VARIABLES, *PRIVATE], form=KNOWN_FORM, url=URL),
        "configs/callback/client.yaml": SETTINGS,
        "configs/data/site.yaml": "# Digits.\ndefaults: digits\n_target_: canary.Data\n",
        ".env": "".join(f"{name}={value}\n" for name, value in PRIVATE.items()),
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(root)]
    for words in (["init", "-q"], ["add", "pyproject.toml", "configs"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    return root


def found(content: bytes) -> set[str]:
    return {each.decode() for each in LOOSE.findall(content)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_secret_is_in_what_commands_print_and_write(project: Path, tmp_path: Path) -> None:
    variables = environment(HOME=str(tmp_path), **VARIABLES)
    outputs = dict[str, bytes]()

    def call(*words: str, statuses: tuple[int, ...] = (0,)) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "boltcutter", *words],
            cwd=project,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=patience(200),
        )
        outputs[" ".join(words)] = done.stdout
        assert done.returncode in statuses, done.stdout.decode()

    run, other, failed = (tmp_path / "runs" / "digits" / name for name in ("one", "other", "failed"))
    common = (
        "data=site",
        "model=linear",
        "callback=client",
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=4",
        "logger=[csv,wandb]",
    )
    call("train", *common, f"folder={run}")
    call("train", *common, "seed=2", f"folder={other}")
    call("train", *common, "callback.client.fails=true", f"folder={failed}", statuses=(1,))
    for refused in (
        f"+model.api_key={LITERAL}",
        f"callback.client.url={URL}",
        f"tags=[{KNOWN_FORM}]",
        f"tags=[{VARIABLES['API_KEY_PROD']}]",
    ):
        call("check", "--json", *common, refused, statuses=(2,))
    call("launch", "launch=local", *common, f"launch.setup=export MY_TOKEN={LITERAL}", statuses=(2,))
    call("launch", "launch=local", *common, f"launch.setup=login {VARIABLES['MY_SERVICE_KEY']}", statuses=(2,))
    call("train", "--print", *common)
    call("train", "--describe", "callback", *common)
    call("evaluate", f"run={run}", "--json")
    call("export", f"run={run}", "export=onnx")
    call("why", f"run={run}", f"html={tmp_path / 'why.html'}")
    call("bisect", str(run), str(other), statuses=(0, 1))
    call("compare", f"run={run}", f"with={other}", statuses=(0, 1))
    call("golden", f"run={run}", "name=canary")
    call("audit", *common)
    call("info", f"run={run}")
    call("runs", f"runs={tmp_path / 'runs'}", "--html")
    call("runs", f"runs={tmp_path / 'runs'}", "--json")
    call("runs", "archive", "one", f"runs={tmp_path / 'runs'}")
    call("runs", "restore", "one", f"runs={tmp_path / 'runs'}")
    outputs |= serve(run, project, variables)
    hits = {name: secrets for name, text in outputs.items() if (secrets := found(text))}
    own = {project / name for name in ("src/canary/__init__.py", ".env")}
    for file in (path for path in tmp_path.rglob("*") if path.is_file() and path not in own):
        if file.suffix != ".pyc" and ".git" not in file.parts and (secrets := found(file.read_bytes())):
            hits[str(file.relative_to(tmp_path))] = secrets
        if tarfile.is_tarfile(file):
            with tarfile.open(file) as archive:
                for member in filter(tarfile.TarInfo.isfile, archive.getmembers()):
                    if secrets := found(archive.extractfile(member).read()):  # type: ignore[union-attr]
                        hits[f"{file}: {member.name}"] = secrets
    assert hits == {}


def page(url: str, end: float) -> bytes:
    """A page of a server, which prints its address before it answers."""
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            return error.read()
        except urllib.error.URLError:
            assert time.monotonic() < end
            time.sleep(0.2)


def serve(run: Path, project: Path, variables: dict[str, str]) -> dict[str, bytes]:
    """What a server prints, and its pages."""
    command = [sys.executable, "-m", "boltcutter", "serve", f"run={run}", "port=0"]
    log = run.parent / "serve.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=project, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    pages = dict[str, bytes]()
    try:
        end = time.monotonic() + patience(90)
        while not (address := re.search(rb"http://127\.0\.0\.1:[0-9]+", log.read_bytes())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        for place in ("", "/openapi.json", "/metrics"):
            pages[f"serve {place}"] = page(address[0].decode() + place, end)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
    return pages | {"serve": log.read_bytes()}
