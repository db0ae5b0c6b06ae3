from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from conftest import Script, require

from boltcutter.config.errors import ConfigError
from boltcutter.search.settings import Search
from boltcutter.search.space import Space
from boltcutter.search.trial import Sampled

require(install="pip install -c constraints.txt -e '.[dev-cloud]'", package="ray")
from ray.tune.schedulers import PopulationBasedTraining  # noqa: E402

from boltcutter.search import ray_tune  # noqa: E402


@pytest.mark.slow
def test_a_search_on_ray(script: Script, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    options = ["search=asha", "search.num_trials=2", "search.scheduler.grace_period=1", "search.max_parallel=2"]
    training = ["model=linear", "logger=null", "data.num_workers=0", "trainer.max_epochs=2", f"folder={folder}"]
    done = script("search", *options, *training, env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    trials = pd.read_csv(folder / "trials.csv")
    assert set(trials["state"]) <= {"complete", "pruned"}
    assert len(list((folder / "trials").iterdir())) == 2
    assert (folder / "best.yaml").is_file()
    assert not (folder / ray_tune.FILES).exists()
    assert not list(tmp_path.glob("ray*"))


def test_a_population_perturbs_values_within_their_bounds() -> None:
    space = Space({"a": "int(1, 8)", "b": "loguniform(0.1, 1)", "c": "choice(x, y)", "d": "int(1, 2) if c == x"})
    scheduler = partial(PopulationBasedTraining, metric="loss", mode="min")
    made = ray_tune.make_scheduler(scheduler, space)
    assert isinstance(made, PopulationBasedTraining)
    assert made._hyperparam_mutations.keys() == {"a", "b", "c"}
    perturbed = ray_tune._clip(space.parameters[:3], {"number": 3, "a": 9.6, "b": 0.01, "c": "y"})
    assert perturbed == {"number": 3, "a": 8, "b": 0.1, "c": "y"}


def test_values_become_a_configuration_of_ray() -> None:
    assert ray_tune.as_config(Sampled(3, {"optimizer.lr": 0.1})) == {"number": 3, "replays": False, "optimizer.lr": 0.1}


def test_a_cluster_on_this_machine_admits_the_trials_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_tune.os, "cpu_count", lambda: 2)
    assert ray_tune.needed_cpus(Search(), 1) == 2
    assert ray_tune.needed_cpus(Search(max_parallel=4), 2) == 8


def test_a_trial_that_no_node_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0}}, {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}]
    monkeypatch.setattr(ray_tune, "ray", SimpleNamespace(nodes=lambda: nodes))
    ray_tune.check_resources(4, 0)
    with pytest.raises(ConfigError, match=r"search.cpus=1 search.gpus=1: .* largest has 4 CPUs and 0 GPUs; ask"):
        ray_tune.check_resources(1, 1)
