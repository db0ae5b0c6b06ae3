import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import environment
from slurm_cluster import Launch
from third_party.gallery import overrides

from boltcutter.assembly.assemble import complete_config
from boltcutter.assembly.overrides import read_overrides
from boltcutter.callback.spot_interruption import SpotInterruption
from boltcutter.config.errors import ConfigError
from boltcutter.config.instantiate import build
from boltcutter.data.digits import Digits
from boltcutter.environment import user_key
from boltcutter.launch import command
from boltcutter.launch.cloud.azureml import AzureMLLauncher
from boltcutter.launch.cloud.vertex import VertexLauncher
from boltcutter.launch.cloud_job import CloudLauncher
from boltcutter.launch.kubernetes import KubernetesLauncher
from boltcutter.launch.local import LocalLauncher
from boltcutter.project import Project
from boltcutter.run import lineage, trust
from boltcutter.run.folder import read_record, save_config, update_record

ROOT = Path(__file__).parents[2]
PROJECT = Project.find(__file__)


def test_a_login_node_needs_no_torch() -> None:
    code = "import sys; sys.modules.update(torch=None, lightning=None); import boltcutter.launch.command"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_launch_settings_are_separate_from_training(launch: Launch) -> None:
    arguments = ["launch=slurm", "trainer.accelerator=cpu", "launch.time=2:00:00", "model=mlp"]
    text = launch(*arguments, "--dry-run")
    assert "note: torch is not installed on this host, so only the keys of the configuration were checked\n" in text
    assert "#SBATCH --time=2:00:00" in text
    with pytest.raises(ConfigError, match=r"launch.tim: SlurmLauncher takes no such argument; did you mean time\?"):
        launch(*arguments, "launch.tim=1:00:00", "--dry-run")
    with pytest.raises(ConfigError, match="modl: no such key"):
        launch(*arguments, "modl=mlp", "--dry-run")


def test_a_task_with_its_own_dataloaders_has_no_global_batch(launch: Launch) -> None:
    arguments = ["launch=slurm", "launch.time=1:00:00", "trainer.accelerator=cpu", "trainer.devices=3"]
    assert "#SBATCH --ntasks-per-node=3" in launch(*arguments, *overrides("own_loaders"), "--dry-run")


def test_a_users_file_overrides_the_project_and_arguments_override_both(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "slurm.yaml").write_text('partition: mine\ntime: "9:00:00"\n')
    text = launch("launch=slurm", "launch.time=2:00:00", "--dry-run")
    assert "#SBATCH --partition=mine\n" in text
    assert "#SBATCH --time=2:00:00\n" in text
    (tmp_path / "site" / "slurm.yaml").write_text("time: 9:00:00\n")  # YAML reads it as a number
    assert "#SBATCH --time=9:00:00\n" in launch("launch=slurm", "--dry-run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["launch=[vertex,azureml]"],
            r"launch=\[vertex,azureml\]: more than one of these is a launcher; keep one of them",
        ),
        ([], r"launch: not set; .* \(there are: .*local, .*slurm"),
        (["launch=slurn"], "launch=slurn: no such option; did you mean slurm"),
        (["launch=8"], "launch=8: no such option"),
        (["launch={a: 1}"], "no such option"),
        (["launch=[null]"], "launch: not set"),
        (["launch=local", "launch.array=seed=1,2"], "launch.array: launch=slurm and launch=kuber"),
        (["launch=slurm", "launch.array=seed=1,2", "resume=x"], "cannot be combined with resume"),
        (["launch=slurm", "launch.array=trainer.devices=1,2"], "all runs must use the same nodes, devices and workers"),
        (["launch=slurm", "trainer=ddp"], "trainer.devices=auto: a job needs an explicit number"),
        (["launch=slurm", "trainer.devices=3"], "data.batch_size=64 does not divide over 3 ranks; try 66"),
        (["launch=slurm", "trainer.num_nodes=0"], "trainer.num_nodes=0 is not a number of nodes"),
        (["status"], "status: .*; use status run=<folder"),
        (["cancel", "run=nowhere"], "^run=nowhere: no run there"),
        (["run=nowhere", "status"], "^run=nowhere: no run there"),
        (["statu", "run=x"], "^statu: no such command of launch; did you mean status"),
        (["list", "folder=x"], "list: folder=x: takes only runs="),
    ],
)
def test_mistakes_are_one_line(launch: Launch, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launch(*arguments, "--dry-run")


def test_a_local_run_from_submission_to_its_end(launch: Launch, tmp_path: Path) -> None:
    interpreter, folder = tmp_path / "python", tmp_path / "run"
    interpreter.write_text('#!/bin/bash\necho "given $*"\n')
    interpreter.chmod(0o755)
    output = launch("launch=local", f"launch.python={interpreter}", f"folder={folder}", "seed=3")
    assert f": {folder}\n" in output
    record = json.loads((folder / "record.json").read_text())
    assert (record["config"]["seed"], record["attempts"]) == (3, [])
    assert "launch" not in record["config"]
    digest = user_key.digest(record["config"])  # the job trusts this record, and no other in its place
    given = f"given {ROOT}/scripts/train.py resume={folder} trust=sha256:{digest}\n"
    assert launch("logs", f"run={folder}", "--wait") == given
    assert launch("status", f"run={folder}") == f"{folder}: process {record['launch']['id'].split()[0]}\n"
    with pytest.raises(ConfigError, match="holds a run; use resume="):
        launch("launch=local", f"folder={folder}")
    os.waitpid(int(record["launch"]["id"].split()[0]), 0)


def test_a_resumed_run_keeps_its_launch_settings(launch: Launch, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launch("launch=slurm", "--check")
    (folder / "logs").mkdir(parents=True)
    slurm = "boltcutter.launch.slurm.SlurmLauncher"
    settings = {"_target_": slurm, "time": "9:00:00", "partition": "big", "memory": "64G"}
    settings |= {"array": "seed=1,2", "max_parallel": 1}
    facts = {"launch": {"settings": settings, "id": "7", "submitted": "", "signature": user_key.sign(settings)}}
    training = read_overrides(PROJECT, [])
    save_config(training.changed({"folder": str(folder)}), **facts)
    for arguments in (["launch=slurm"], []):
        text = launch(*arguments, f"resume={folder}", "launch.memory=9G", "--dry-run")
        assert {"--time=9:00:00", "--partition=big", "--mem=9G"} <= set(re.findall("^#SBATCH (.*)", text, re.M))
        assert "--array" not in text
    (tmp_path / "other.yaml").write_text("_target_: boltcutter.launch.slurm.SlurmLauncher\n")
    text = launch(f"launch=[slurm,{tmp_path}/other.yaml]", f"resume={folder}", "--dry-run")
    assert "--partition" not in text
    assert f"resume={folder} trust=sha256:" in launch("launch=local", f"resume={folder}", "--dry-run")
    update_record(folder, config={**read_record(folder)["config"], "seed": 99})  # possibly by another user
    assert f"resume={folder}\n" in launch("launch=local", f"resume={folder}", "--dry-run")
    update_record(folder, launch={**facts["launch"], "settings": {**settings, "setup": ["touch evil"]}})
    with pytest.raises(ConfigError, match=r"launch settings.*; set trust=true"):
        launch(f"resume={folder}", "--dry-run")


def test_job_variables_remain_references_until_the_job_runs(launch: Launch, tmp_path: Path) -> None:
    python, folder = tmp_path / "python", tmp_path / "run"
    python.write_text("#!/bin/bash\n")
    python.chmod(0o755)
    arguments = [
        "data.path=${oc.env:SLURM_TMPDIR}/numbers",
        "data=tabular",
        "launch.environment={CACHE: '$SLURM_TMPDIR/x'}",
    ]
    arguments += ["name=${oc.env:CACHE}"]
    output = launch("launch=local", f"launch.python={python}", f"folder={folder}", *arguments)
    assert "note: SLURM_TMPDIR, CACHE will be set only in the job" in output
    config = read_record(folder)["config"]
    assert config["data"]["path"] == "${oc.env:SLURM_TMPDIR}/numbers"
    assert 'export CACHE="$SLURM_TMPDIR/x"\n' in (folder / "job.sh").read_text()
    assert "SLURM_TMPDIR" not in os.environ
    with pytest.raises(ConfigError, match="environment variable TMPDIRR is not set"):
        launch("launch=local", "data=tabular", "data.path=${oc.env:TMPDIRR}", "--check")
    os.waitpid(int(read_record(folder)["launch"]["id"].split()[0]), 0)


def test_a_job_runs_the_code_as_it_was_at_submission(tmp_path: Path) -> None:
    """The code of a project is changed after the submission and before the start."""
    project, folder = tmp_path / "project", tmp_path / "run"
    for name in ("src", "scripts", "configs"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", project)
    (project / "src" / "fact.py").write_text("VALUE = 'first'\n")
    (project / "scripts" / "train.py").write_text("import fact, sys\nprint(fact.VALUE, sys.argv[1])\n")
    env = environment(GIT_CONFIG_GLOBAL=os.devnull, PYTHONPATH=str(project / "src"))
    for arguments in ("init -q", "add -A", "-c user.name=x -c user.email=x commit -qm x"):
        subprocess.run(["git", *arguments.split()], cwd=project, env=env, check=True)
    (project / "src" / "fact.py").write_text("VALUE = 'second'\n")
    slow = tmp_path / "python"  # simulates a queue: starts after the code has been changed
    slow.write_text(f'#!/bin/bash\nuntil [ -e {tmp_path}/go ]; do sleep 0.02; done\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    start = "import runpy, sys; sys.modules.update(torch=None, lightning=None); del sys.argv[0]; "
    start += "runpy.run_path(sys.argv[0], run_name='__main__')"  # as on a login node
    call = [sys.executable, "-c", start, "scripts/launch.py", "launch=local"]
    call += [f"launch.python={slow}", f"folder={folder}"]
    launched = subprocess.run(call, cwd=project, env=env, capture_output=True, text=True, timeout=60)
    assert launched.returncode == 0, launched.stderr
    (project / "src" / "fact.py").write_text("VALUE = 'third'\n")
    (project / "scripts" / "train.py").unlink()
    (tmp_path / "go").touch()
    log = folder / "logs" / "local.log"
    end = time.monotonic() + 20
    while "\n" not in log.read_text():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert log.read_text() == f"second resume={folder}\n"
    git = json.loads((folder / "record.json").read_text())["git"]
    assert git["dirty"]
    assert "+VALUE = 'second'" in (folder / "code.patch").read_text()
    state = lineage.git_state(folder / "code" / "src" / "boltcutter")
    assert {**state, "patch": "code.patch"} == git


@pytest.mark.parametrize("ignored", ["", "train.py\n"])
def test_a_script_that_git_ignores_is_replaced_by_the_module(tmp_path: Path, ignored: str) -> None:
    root, folder = tmp_path / "project", tmp_path / "run"
    (root / "scripts").mkdir(parents=True)
    (root / "scripts" / "train.py").touch()
    (root / ".gitignore").write_text(ignored)
    for arguments in ("init -q", "add -A"):
        subprocess.run(["git", *arguments.split()], cwd=root, check=True)
    cfg = read_overrides(PROJECT, ["trainer.devices=1", f"folder={folder}"])
    job, _ = command.create_job([cfg], root, LocalLauncher())
    code = folder / "code"
    assert job.program == (["-m", "boltcutter", "train"] if ignored else [f"{code}/scripts/train.py"])
    assert job.environment == ({"BOLTCUTTER_PROJECT": str(code)} if ignored else {})


def test_launch_settings_are_described(launch: Launch) -> None:
    assert "launch.max_parallel" in launch("launch=slurm", "--describe")
    assert "Seconds before the time limit" in launch("launch=slurm", "--describe", "launch.grace")


@pytest.mark.parametrize("arguments", [["status", "run={}"], ["launch=local", "resume={}"]])
def test_an_untrusted_record_is_not_executed(launch: Launch, tmp_path: Path, arguments: list[str]) -> None:
    evil = {"_target_": "os.mkdir", "path": str(tmp_path / "evil")}
    (tmp_path / "run").mkdir()
    record = {"config": {}, "attempts": [], "launch": {"settings": evil, "id": "1"}}
    (tmp_path / "run" / "record.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"refers to os\.mkdir, .*; set trust=true"):
        launch(*(argument.format(tmp_path / "run") for argument in arguments))
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("launcher", "cloud"),
    [
        (VertexLauncher(spot=True), "gce"),
        (AzureMLLauncher(spot=True), "azure"),
        # https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms: pods have 15 seconds, if any
        (KubernetesLauncher(pod={"nodeSelector": {"cloud.google.com/gke-spot": "true"}}), None),
        (KubernetesLauncher(pod={"nodeSelector": {"gpu": "h200"}}), None),
        (VertexLauncher(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_runs_on_spot_machines_save_regularly_and_when_the_cloud_announces_an_interruption(
    launcher: CloudLauncher, cloud: str | None
) -> None:
    cfg = complete_config(command.prepare_for_spot(command.read_training_config(PROJECT, []), launcher))
    assert cfg.callback["preemption"]["save_minutes"] == (command.SAVE_MINUTES if launcher.spot else None)
    assert (cfg.callback.get("spot_interruption") or {}).get("cloud") == cloud
    if cloud:
        assert isinstance(build(cfg.callback["spot_interruption"]), SpotInterruption)


class OwnDigits(Digits):
    """A data module of a project."""


KUBERNETES = ["launch=kubernetes", "launch.image=a:1", "launch.storage=s3://bucket/runs"]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["callback.preemption.save_minutes=0"], r"callback\.preemption\.save_minutes=0 is not positive"),
        (["callback=[default,early_stopping]", "callback.early_stopping.mode=most"], r"callback\.early_stopping"),
        (["+trainer.strategy=dpd"], r"trainer\.strategy=dpd: no such strategy; did you mean ddp"),
        (["trainer=ddp", "trainer.strategy.process_group_backend=3"], r"trainer\.strategy\.process_group_backend"),
        (["trainer.gradient_clip_val=-1"], r"trainer\.gradient_clip_val=-1 is negative"),
        (["trainer=fsdp", "trainer.strategy.state_dict_type=sharded"], r"trainer\.strategy\.state_dict_type=sharded: "),
        (["trainer=deepspeed"], r"trainer\.strategy=deepspeed: shards need a folder"),
        (["optimizer.lr=-1"], r"optimizer\.lr=-1\.0: Invalid learning rate"),
        (["trainer.max_epochs=-5"], r"trainer\.max_epochs=-5 is negative; try 10"),
        (["callback.best.monitor=val/acc"], r"callback\.best\.monitor=val/acc is never logged"),
        (["model.dropout=-3"], r"model\.dropout"),
        (["trainer.num_nodes=16", "data.batch_size=100"], r"data\.batch_size=100 does not divide over 16 ranks"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_training_would_refuse_is_refused_before_submission(arguments: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as error:
        command.launch_command(PROJECT, [*KUBERNETES, "trainer.devices=1", *arguments, "--dry-run"])
    assert "\n" not in str(error.value)


def test_the_global_batch_of_an_own_data_module_divides_over_the_ranks_of_the_job() -> None:
    cfg = command.read_training_config(PROJECT, ["trainer.num_nodes=8", "trainer.devices=2", "data.batch_size=100"])
    assert not command._has_global_batch(cfg.changed({"data": {"_target_": "lightning.LightningDataModule"}}))
    cfg = cfg.changed({"data": {"_target_": f"{__name__}.OwnDigits"}})
    with pytest.raises(ConfigError, match=r"data\.batch_size=100 does not divide over 16 ranks; try 112"):
        command.check_job(cfg)


def test_strategies_whose_package_only_the_nodes_have_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_spec("deepspeed") is None
    command.launch_command(PROJECT, ["launch=slurm", "trainer=deepspeed", "trainer.devices=1", "--dry-run"])
    assert "#SBATCH" in capsys.readouterr().out


def test_own_settings_of_callbacks_are_kept_on_spot_machines() -> None:
    own = ["callback=[default,spot_interruption]", "callback.spot_interruption.cloud=ec2"]
    cfg = command.read_training_config(PROJECT, [*own, "callback.preemption.save_minutes=3"])
    command.prepare_for_spot(cfg, VertexLauncher(spot=True))
    assert (cfg.callback["spot_interruption"]["cloud"], cfg.callback["preemption"]["save_minutes"]) == ("ec2", 3)
    cfg = command.read_training_config(PROJECT, ["callback=null"])
    command.prepare_for_spot(cfg, VertexLauncher(spot=True))
    assert not cfg.callback


def test_combinations_are_the_cartesian_product() -> None:
    expected = [["seed=1", "lr=0.1"], ["seed=1", "lr=0.01"], ["seed=2", "lr=0.1"], ["seed=2", "lr=0.01"]]
    assert command.combinations("seed=1,2;lr=0.1,0.01") == expected
    assert command.combinations(["seed=1,2", "lr=0.1,0.01"]) == expected
    assert command.combinations("callback=default,[default,ema]") == [["callback=default"], ["callback=[default,ema]"]]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("seed", "launch.array=seed: invalid syntax"),
        ("seed=1,", "launch.array=seed=1,: invalid syntax"),
        ("seed=1,1", "launch.array=seed=1,1 has a duplicate value"),
        ("seed=1;seed=2", "has a duplicate key"),
    ],
)
def test_invalid_arrays_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command.combinations(spec)


@pytest.mark.parametrize("override", ["launch.setup=[touch executed]", "launch.python=./x", "launch=theirs.yaml"])
def test_an_agent_takes_launch_settings_of_the_project_only(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are commands, which a job runs."""
    monkeypatch.setenv(trust.AGENT, "1")
    with pytest.raises(ConfigError, match="an agent takes launch settings from configs/launch only"):
        command.read_launcher(PROJECT, [*(["launch=slurm"] if "." in override[:7] else []), override])
    assert command.read_launcher(PROJECT, ["launch=local"])
