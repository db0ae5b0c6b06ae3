"""The scripts that instances of EC2 run."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from boltcutter_cloud.ec2 import check_requirements

from .test_ec2 import CASES, job, launcher


def write_scripts(name: str, folder: Path) -> dict[str, Path]:
    """Write a job file, the user data in it, and the files that this creates, to a folder."""
    settings, facts = CASES[name]
    user_data = yaml.safe_load(launcher(**settings).render(job(**facts)))["UserData"]
    found = {"user_data": user_data}
    found |= dict(re.findall(r"<<'(SETUP|RUN|UNIT)'\n(.*?\n)\1\n", user_data, re.DOTALL))
    assert len(found) == 4
    for name, text in found.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in found}


@pytest.mark.parametrize("name", CASES)
def test_scripts_are_correct_shell(name: str, tmp_path: Path) -> None:
    scripts = write_scripts(name, tmp_path)
    if not shutil.which("shellcheck"):
        assert os.environ.get("CI") != "true", "apt-get install shellcheck"
        pytest.skip("apt-get install shellcheck")
    texts = [str(path) for name, path in scripts.items() if name != "UNIT"]
    done = subprocess.run(["shellcheck", "-s", "bash", *texts], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_set_up_waits_for_the_lock_of_apt(tmp_path: Path) -> None:
    # An option of apt since 1.9.11: https://manpages.debian.org/apt.conf.5
    setup = write_scripts("ec2.yaml", tmp_path)["SETUP"].read_text()
    line = next(line for line in setup.splitlines() if "apt.conf.d" in line)
    assert setup.index(line) < setup.index("apt-get")
    folder = tmp_path / "apt.conf.d"
    folder.mkdir()
    subprocess.run(["bash", "-euc", line.replace("/etc/apt/apt.conf.d", str(folder))], check=True)
    if shutil.which("apt-config"):
        (file,) = folder.iterdir()
        command = ["apt-config", "-c", str(file), "dump", "DPkg::Lock::Timeout"]
        assert subprocess.run(command, capture_output=True, text=True).stdout == 'DPkg::Lock::Timeout "600";\n'


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_the_unit_is_valid(tmp_path: Path) -> None:
    unit = write_scripts("ec2.yaml", tmp_path)["UNIT"].rename(tmp_path / "boltcutter.service")
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert "boltcutter.service" not in done.stderr, done.stderr
    unit.write_text(unit.read_text().replace("KillMode=mixed", "KillMode=mixture"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert "boltcutter.service:11: Failed to parse kill mode" in done.stderr  # it does check


def test_requirements_on_this_machine_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    check_requirements(tmp_path)
    for accepted in ("boltcutter>=0.1", "boltcutter @ git+https://server/boltcutter@0123"):
        file.write_text(f'dependencies = [\n    "{accepted}",\n    "scikit-learn",\n]\n')
        check_requirements(tmp_path)
    for refused in ("file:///home/me/boltcutter", "git+file://localhost/home/me@0123", "git+ssh://git@server/it@0123"):
        file.write_text(f'dependencies = [\n    "boltcutter @ {refused}",\n]\n')
        with pytest.raises(ValueError, match=r"^launch\.install: .* requires boltcutter @ .*https") as error:
            check_requirements(tmp_path)
        assert refused in str(error.value)
