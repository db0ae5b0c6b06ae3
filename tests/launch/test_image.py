"""The Dockerfile of this repository and of a new project: podman builds the image, and trains in it.

The base image is made by debootstrap, as there is no registry; Python is that of Debian.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT, require

from boltcutter.project import Project
from boltcutter.scaffold import new

from .nodes import AS_ROOT
from .podman import Podman
from .test_library import git
from .test_node import bundle as bundle

TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"
BASE = "localhost/python:3.11-slim"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDER_CUDA = "https://download.pytorch.org/whl/cu126"
PACKAGES = "ca-certificates,python3,python3-venv"


@pytest.mark.parametrize("folder", [ROOT, TEMPLATE], ids=["repository", "project"])
def test_the_linter_finds_nothing(folder: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, folder / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["Dockerfile", ".dockerignore"])
def test_repository_and_project_build_the_same_image(name: str) -> None:
    assert (ROOT / name).read_text() == (TEMPLATE / name).read_text()


@pytest.mark.parametrize(
    ("network", "expected"), [("", set()), ("infiniband", {"apt-get"}), ("efa", {"apt-get", "efa"})]
)
def test_an_image_for_several_nodes_has_the_libraries_of_its_network(
    network: str, expected: set[str], tmp_path: Path
) -> None:
    """NCCL loads libibverbs.so.1 and the plugin libnccl-net.so, and uses TCP without a word if there are none.

    The installer's options in containers: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html.
    """
    (step,) = re.findall(r"^RUN (\[ -z \"\$NETWORK\" .*?^    \})$", (ROOT / "Dockerfile").read_text(), re.M | re.S)
    for name in ("apt-get", "ldconfig"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/{name}.log\n')
        (tmp_path / name).chmod(0o755)
    installer = tmp_path / "aws-efa-installer" / "efa_installer.sh"
    installer.parent.mkdir()
    installer.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/efa.log\n')
    installer.chmod(0o755)
    subprocess.run(["tar", "-czf", "efa.tar.gz", "aws-efa-installer"], cwd=tmp_path, check=True)
    script = (
        step.replace("\\\n", "").replace("/tmp/", f"{tmp_path}/").replace("/var/lib/apt/lists", f"{tmp_path}/lists")
    )
    script = script.replace("-C /tmp ", f"-C {tmp_path} ").replace("/etc/ld.so.conf.d", str(tmp_path))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NETWORK": network, "EFA": f"file://{tmp_path}/copy.tar.gz"}
    shutil.copyfile(tmp_path / "efa.tar.gz", tmp_path / "copy.tar.gz")
    subprocess.run(["sh", "-ec", script], env=env, check=True)
    found = {file.stem for file in tmp_path.glob("*.log")}
    assert found - {"ldconfig"} == expected
    if network:
        assert {"libibverbs1", "ibverbs-providers"} <= set((tmp_path / "apt-get.log").read_text().split())
    if network == "efa":
        assert (tmp_path / "efa.log").read_text() == "-y --skip-kmod --skip-limit-conf\n"
        assert (tmp_path / "ofi-nccl.conf").read_text() == "/opt/amazon/ofi-nccl/lib\n"


def test_another_build_of_torch_brings_its_own_versions_of_cuda(tmp_path: Path) -> None:
    # torch 2.13 for CUDA 12.6 requires cuda-bindings 12, but constraints.txt has those of CUDA 13:
    # https://github.com/pytorch/pytorch/blob/v2.13.0/.github/scripts/generate_binary_build_matrix.py
    (line,) = re.findall(r"^RUN (case .* esac) ", (ROOT / "Dockerfile").read_text(), re.M)
    pins = (ROOT / "constraints.txt").read_text()
    for index, is_other in (("https://pypi.org/simple", False), (CPU_INDEX, False), (OLDER_CUDA, True)):
        file = tmp_path / "constraints.txt"
        file.write_text(pins)
        subprocess.run(["sh", "-ec", line], cwd=tmp_path, env={**os.environ, "TORCH_INDEX": index}, check=True)
        removed = set(pins.splitlines()) - set(file.read_text().splitlines())
        assert bool(removed) is is_other
        assert all(pin.startswith(("cuda-", "nvidia-")) for pin in removed)
        assert ("cuda-bindings" in file.read_text()) is not is_other
    assert OLDER_CUDA in (ROOT / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """Podman with the base image."""
    require("debootstrap", install="apt-get install debootstrap")
    found = Podman()
    root = tmp_path_factory.mktemp("base") / "root"
    source = "http://deb.debian.org/debian"
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root), source]
    done = subprocess.run([*AS_ROOT, *command], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    subprocess.run([*AS_ROOT, "ln", "-s", "/usr/bin/python3.11", root / "usr/local/bin/python"], check=True)
    archive = subprocess.run([*AS_ROOT, "tar", "-C", root, "-c", "."], check=True, capture_output=True).stdout
    subprocess.run([*AS_ROOT, "rm", "-r", root], check=True)
    found("import", "-q", "-", BASE, given=archive, timeout=300)
    yield found
    found.remove()


def pip_options(folder: Path) -> list[str]:
    """Return options of podman with which pip finds packages as it does here."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    settings = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", listed.stdout, re.M))
    (folder / "pip.conf").write_text("[global]\n" + "".join(f"{name} = {text}\n" for name, text in settings.items()))
    places = {place for text in settings.values() for place in re.findall(r"(?:^|\s|file://)(/[\w./-]+)", text)}
    # Beside an index are its files, and beside a certificate the folder that others link to.
    places = {place.removesuffix("/simple") for place in places if os.path.exists(place)}
    places = {str(Path(place).parent) if os.path.isfile(place) else place for place in places}
    index = [] if "find-links" in settings else ["--build-arg", f"TORCH_INDEX={CPU_INDEX}"]
    volumes = [f"{folder}/pip.conf:/etc/pip.conf:ro", *(f"{place}:{place}:ro" for place in sorted(places))]
    return [*index, *(word for volume in volumes for word in ("--volume", volume))]


@pytest.fixture(scope="module", params=["repository", "project"])
def build(
    request: pytest.FixtureRequest, podman: Podman, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Callable[[], str]]:
    """The folder of the repository or of a project, and a function that builds its image and returns the output."""
    scratch = tmp_path_factory.mktemp("build")
    options = [*pip_options(scratch), "--network", "host", "--build-arg", f"BASE={BASE}"]
    root = scratch / "repository"
    shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(".venv", ".git", "runs", ".*_cache"))
    if request.param == "project":
        for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "The template"]):
            git(root, *arguments)
        options += ["--volume", f"{root}:{root}:ro"]  # pip clones the library from there
        root = new.new_command(Project.at(ROOT), ["my-project", f"folder={scratch}", f"template={root}"])

    def call() -> str:
        done = podman("build", "--tag", "image", *options, str(root), timeout=1500)
        return done.stdout + done.stderr

    call()
    return root, call


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_an_image_trains_saves_on_sigterm_and_resumes(
    build: tuple[Path, Callable[[], str]], bundle: Path, podman: Podman, tmp_path: Path
) -> None:
    def run(*arguments: str, options: tuple[str, ...] = ()) -> str:
        return podman("run", "--rm", "--network=none", *options, "image", *arguments, timeout=200).stdout

    (config,) = json.loads(podman("inspect", "image").stdout)
    assert config["Config"]["Cmd"] == ["python", "scripts/train.py"]
    assert config["User"] == "1000"
    for user in ("1000", "54321:0"):  # OpenShift chooses one
        write = "touch ~/a runs/a data/a && ! touch scripts/a 2>/dev/null && ls -A && id -u"
        *files, found = run("sh", "-c", write, options=("--user", user)).split()
        assert found == user.partition(":")[0]
        assert {"configs", "scripts", "src"} <= set(files)
        assert not {".git", ".venv"} & set(files)
    tested = set((build[0] / "constraints.txt").read_text().replace(" ", "\n").splitlines())
    installed = [line for line in run("pip", "freeze").splitlines() if "==" in line]
    assert len(installed) > 40
    assert not {re.sub(r"\+cpu$", "", line).lower().replace("_", "-") for line in installed} - tested

    folder, overrides = "/app/runs/here", ["trainer.accelerator=cpu", "logger=null", "report=false"]
    volume = f"--volume=runs-{build[0].name}:/app/runs"  # all images are built in one storage
    podman("volume", "create", f"runs-{build[0].name}")
    for start in (1, 2):
        given = f"folder={folder}" if start == 1 else f"resume={folder}"
        command = ["python", "scripts/train.py", given, *(overrides if start == 1 else []), "trainer.max_epochs=5000"]
        podman("run", "--detach", "--name=run", "--network=none", volume, "image", *command)
        end = time.monotonic() + 150
        while "epoch " not in (text := podman("logs", "run").stdout):
            assert time.monotonic() < end, podman("logs", "run")
            time.sleep(0.3)
        assert podman("top", "run", "pid", "comm").stdout.split()[2:4] == ["1", "python"]
        podman("stop", "--time", "100", "run", timeout=150)
        logs = podman("logs", "run")
        assert podman("wait", "run").stdout.strip() == "143", logs
        assert "preempted by SIGTERM, saved" in logs.stdout + logs.stderr
        assert ("epoch 1/" in text) == (start == 1)
        podman("rm", "run")
    record = json.loads(run("cat", f"{folder}/record.json", options=(volume,)))
    assert len(record["attempts"]) == 2

    # As in a cloud: the code comes with the job, and the image has everything else.
    shutil.copy(bundle, tmp_path / "job.tar.gz")
    node = ["python", "-m", "boltcutter.launch.node", "/app/runs/node", "--bundle", "/job.tar.gz", "trust=true"]
    mounted = (f"--volume={tmp_path}/job.tar.gz:/job.tar.gz:ro", volume)
    run(*node, "trainer.accelerator=cpu", options=mounted)
    record = json.loads(run("cat", "/app/runs/node/record.json", options=mounted))
    assert record["attempts"][-1]["reason"] == "completed"


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_change_of_the_code_does_not_install_again(build: tuple[Path, Callable[[], str]]) -> None:
    root, call = build
    (root / "scripts" / "train.py").write_text((root / "scripts" / "train.py").read_text() + "# changed\n")
    steps = re.split(r"^\[\d/\d\] ", call(), flags=re.M)
    installs = [step for step in steps if "RUN" in step and "pip install" in step]
    assert len(installs) == 2
    assert all("Using cache" in step for step in installs)
