"""Train on Ray: ``python -m boltcutter_launch.ray_driver`` reads a plan as JSON, and waits until the run has ended.

Ray Train starts the workers, and restarts all of them when one is lost; the training then resumes in its run folder.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from boltcutter_launch.job import follow_log
from boltcutter_launch.ray_cluster import ray_cluster

POLL_SECONDS = 0.5
NOTE_SECONDS = 60.0  # after which a start that waits is reported
MAX_REASON = 500  # characters of an error of Ray
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
VARIABLES = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process that waits for notices, while ranks are restarted anyway
}


@dataclass(frozen=True)
class Plan:
    """What to start, and with which resources; the last settings are those of the launcher."""

    folder: str  # of the run
    command: list[str]  # of each rank
    nodes: int = 1
    devices: int = 1  # ranks on each node
    gpus: bool = False  # whether each rank has one
    cpus: float = 1  # of each rank
    environment: dict[str, str] = field(default_factory=dict)
    max_restarts: int = 10
    timeout: float = 60
    address: str | None = None
    dashboard: bool = False
    ports: dict[str, int] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        """The log of the driver and of all ranks."""
        return Path(self.folder, "logs", "ray.log")

    @property
    def resources(self) -> dict[str, float]:
        """Resources of each rank."""
        return {"CPU": self.cpus, **({"GPU": 1.0} if self.gpus else {})}


class Driver:
    """Starts the run, forwards signals to its ranks, and reports what happens.

    Args:
        plan: What to start.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._received: list[int] = []
        self._sent = 0
        self._attempt = -1
        self._error: BaseException | None = None

    def run(self) -> int:
        """Train, and return the exit status of the driver."""
        plan = self._plan
        os.environ.update({name: value for name, value in VARIABLES.items() if name not in os.environ})
        cluster = {"address": plan.address, "dashboard": plan.dashboard, "ports": plan.ports, "timeout": plan.timeout}
        for number in SIGNALS:
            signal.signal(number, self._receive)
        with ray_cluster(Path(plan.folder), **cluster):  # type: ignore[arg-type]
            try:
                self._wait_for_nodes()
                return self._received[-1] + 128 if self._received else self._train()
            finally:
                if plan.address:  # so that idle nodes end
                    from ray.autoscaler.sdk import request_resources

                    request_resources(bundles=[])

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)

    def _wait_for_nodes(self) -> None:
        import ray
        from ray.autoscaler.sdk import request_resources

        if self._plan.address:  # an autoscaler adds nodes only when something asks for them
            needed = {name: self._plan.devices * each for name, each in self._plan.resources.items()}
            request_resources(bundles=[needed] * self._plan.nodes)
        end = time.monotonic() + (self._plan.timeout if self._plan.address else 0)
        nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
        while fault := missing(self._plan, [node["Resources"] for node in nodes() if node["Alive"]]):
            if time.monotonic() > end:
                raise ValueError(fault)
            if self._received:
                return
            time.sleep(POLL_SECONDS)

    def _train(self) -> int:
        import ray.train
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from boltcutter_launch import ray_worker

        ray.cloudpickle.register_pickle_by_value(ray_worker)  # type: ignore[no-untyped-call]
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        control = ray.remote(ray_worker.Control).options(num_cpus=0, scheduling_strategy=here).remote()
        report(f"starts {self._plan.nodes * self._plan.devices} workers")
        thread = threading.Thread(target=self._fit, args=(control,), daemon=True)
        thread.start()
        noted = time.monotonic() + NOTE_SECONDS
        while thread.is_alive() and not (self._received and self._attempt < 0):  # before the start, nothing is saved
            thread.join(POLL_SECONDS)
            self._exchange(control)
            if self._attempt < 0 and time.monotonic() > noted:
                noted = float("inf")
                report("waits for resources that others use, or for workers that start slowly")
        codes = self._exchange(control)
        if self._received:
            return next((code for code in codes if code > 0), self._received[-1] + 128)
        if isinstance(self._error, ray.train.WorkerGroupError):
            report(f"launch.max_restarts={self._plan.max_restarts} reached")
            return 1
        if self._error is not None:
            report(f"Ray Train failed: {' '.join(str(self._error).split())[:MAX_REASON]}")
            return 1
        status = next((code for code in codes if code), 0)
        report(f"ends with status {status}")
        return status

    def _fit(self, control: Any) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        from boltcutter_launch import ray_worker

        plan, storage = self._plan, self._plan.log.with_name("ray")
        # The path of a snapshot, which workers on other nodes do not inherit.
        inherited = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        config = {
            "control": control,
            "command": plan.command,
            "environment": inherited | plan.environment,
            "cwd": os.getcwd(),
            "log": str(plan.log),
            # Ranks of an earlier driver are not earlier attempts of this job.
            "run_id": f"ray-{Path(plan.folder).name}-{secrets.token_hex(4)}",
            "devices": plan.devices,
            "gpus": plan.gpus,
        }
        strategy = "STRICT_PACK" if plan.nodes == 1 else "STRICT_SPREAD" if plan.devices == 1 else "PACK"
        trainer = DataParallelTrainer(
            ray_worker.train,
            train_loop_config=config,
            backend_config=ray_worker.SharedDevices(),
            scaling_config=ScalingConfig(
                num_workers=plan.nodes * plan.devices,
                use_gpu=plan.gpus,
                resources_per_worker=plan.resources,
                placement_strategy=strategy,
            ),
            run_config=RunConfig(
                name="train",
                storage_path=str(storage),
                failure_config=FailureConfig(max_failures=plan.max_restarts),
            ),
        )
        try:
            trainer.fit()
        except BaseException as error:
            self._error = error
        finally:
            shutil.rmtree(storage, ignore_errors=True)

    def _exchange(self, control: Any) -> list[int]:
        """Forward signals, report events, and return the exit codes of this attempt."""
        import ray

        for number in self._received[self._sent :]:
            self._sent += 1
            report(f"{signal.Signals(number).name}: the run saves and ends")
            ray.get(control.send.remote(number))
        attempt, codes, events = ray.get(control.state.remote())
        for event in events:
            report(event)
        if attempt > self._attempt:
            self._attempt = attempt
            if attempt:
                report(f"all ranks restart, {attempt} of {self._plan.max_restarts}")
        return list(codes)


def missing(plan: Plan, nodes: Sequence[dict[str, float]]) -> str | None:
    """What a cluster lacks for the plan, with the remedy; else None."""
    fitting = [
        node for node in nodes if all(node.get(name, 0) >= plan.devices * each for name, each in plan.resources.items())
    ]
    if len(fitting) >= plan.nodes:
        return None
    needed = ", ".join(f"{name}: {plan.devices * each:g}" for name, each in plan.resources.items())
    found = "; ".join(", ".join(f"{name}: {node.get(name, 0):g}" for name in plan.resources) for node in nodes)
    remedy = "fewer devices, a smaller launch.cpus_per_task" + (", or trainer.accelerator=cpu" if plan.gpus else "")
    if fitting:
        remedy = f"trainer.num_nodes={len(fitting)}"
    return (
        f"trainer.num_nodes={plan.nodes} trainer.devices={plan.devices}: needs {plan.nodes} "
        f"{'node' if plan.nodes == 1 else 'nodes'} with {needed}; the cluster has {found or 'no nodes'}; try {remedy}"
    )


def report(event: str) -> None:
    """Print an event with the time."""
    print(f"{datetime.now():%Y-%m-%d %H:%M:%S} launch: {event}", flush=True)


def show_log(file: Path) -> None:
    """Print what is appended to the log, unless it is the standard output."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    if os.path.samestat(os.fstat(sys.stdout.fileno()), file.stat()):
        return

    def show() -> None:
        for text in follow_log(file, lambda: False):
            print(text, end="", flush=True)

    threading.Thread(target=show, daemon=True).start()


def main() -> int:
    """Train as the plan on the standard input says, and return the exit status."""
    plan = Plan(**json.load(sys.stdin))
    show_log(plan.log)
    try:
        return Driver(plan).run()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
