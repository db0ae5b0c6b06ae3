"""Train on Ray: ``python -m boltcutter.launch.ray_driver`` reads a plan as JSON, and waits until the run has ended.

It reserves the CPUs and GPUs of each node, starts the ranks there, and restarts all of them when one is lost; the
training then resumes in its run folder.
"""

from __future__ import annotations

import json
import os
import secrets
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

from boltcutter.config.errors import one_line
from boltcutter.environment.ray_cluster import ClusterError, ray_cluster
from boltcutter.launch.job import UnreachableError, follow_log

POLL_SECONDS = 0.5
NOTE_SECONDS = 60.0  # after which a start that waits is reported
MAX_REASON = 500  # characters of an error of Ray
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
FAILURE_GRACE = 60.0  # seconds that ranks have to exit after another one has failed
FIRST_SIGNAL_STATUS = 128  # a process that handles a signal exits with this number plus that of the signal


@dataclass(frozen=True)
class Plan:
    """What to start, and with which resources; the last settings are those of the launcher."""

    folder: str  # of the run, or its URL
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
    def log(self) -> Path | None:
        """The log of the driver and of all ranks; None without a disk that all nodes share."""
        return None if "://" in self.folder else Path(self.folder, "logs", "ray.log")

    @property
    def resources(self) -> dict[str, float]:
        """Resources of all ranks of a node."""
        return {"CPU": self.devices * self.cpus, **({"GPU": float(self.devices)} if self.gpus else {})}


class LostError(RuntimeError):
    """A rank was killed, or a worker or node of Ray was lost."""


class Driver:
    """Starts the run, forwards signals to its ranks, restarts all of them when one is lost, and reports what happens.

    Args:
        plan: What to start.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._received: list[int] = []
        # Ranks of an earlier driver are not earlier attempts of this job.
        self._run_id = f"ray-{Path(plan.folder).name}-{secrets.token_hex(4)}"

    def run(self) -> int:
        """Train, and return the exit status of the driver."""
        plan = self._plan
        cluster = {"address": plan.address, "dashboard": plan.dashboard, "ports": plan.ports, "timeout": plan.timeout}
        for number in SIGNALS:
            signal.signal(number, self._receive)
        with ray_cluster(log_to_driver=plan.log is None, **cluster):  # type: ignore[arg-type]
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
            request_resources(bundles=[self._plan.resources] * self._plan.nodes)
        end = time.monotonic() + (self._plan.timeout if self._plan.address else 0)
        nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
        while fault := missing(self._plan, [node["Resources"] for node in nodes() if node["Alive"]]):
            if time.monotonic() > end:
                raise ValueError(fault)
            if self._received:
                return
            time.sleep(POLL_SECONDS)

    def _train(self) -> int:
        """Start all ranks, again while one of them is lost, and return the exit status."""
        for attempt in range(self._plan.max_restarts + 1):
            if attempt:
                report(f"all ranks restart, {attempt} of {self._plan.max_restarts}")
            try:
                status = self._attempt(attempt)
            except LostError:
                if self._received:
                    return self._received[-1] + 128
            else:
                report(f"ends with status {status}")
                return status
        report(f"launch.max_restarts={self._plan.max_restarts} reached")
        return 1

    def _attempt(self, attempt: int) -> int:
        from ray.exceptions import RayError
        from ray.util import placement_group, remove_placement_group

        group = placement_group([self._plan.resources] * self._plan.nodes, strategy="STRICT_SPREAD")
        try:
            self._wait(group.ready(), "waits for resources that others use")
            if self._received:  # before the start, nothing is saved
                return self._received[-1] + 128
            return self._run_ranks(self._start(group, attempt))
        except RayError as error:
            report(f"a worker or a node was lost: {' '.join(str(error).split())[:MAX_REASON]}")
            raise LostError from error
        finally:
            remove_placement_group(group)  # kills its actors, and with each its ranks

    def _wait(self, reference: Any, note: str) -> None:
        import ray

        noted = time.monotonic() + NOTE_SECONDS
        while not self._received and not ray.wait([reference], timeout=POLL_SECONDS)[0]:
            if time.monotonic() > noted:
                noted = float("inf")
                report(note)

    def _start(self, group: Any, attempt: int) -> list[Any]:
        """Start the actor of each node, and with it the ranks."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from boltcutter.launch import ray_worker

        plan, size = self._plan, self._plan.nodes * self._plan.devices
        ray.cloudpickle.register_pickle_by_value(ray_worker)
        node = ray.remote(ray_worker.Node)
        needed = {"num_cpus": plan.resources["CPU"], "num_gpus": plan.resources.get("GPU", 0)}
        nodes: list[Any] = [
            node.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index), **needed).remote()
            for index in range(plan.nodes)
        ]
        address, port = ray.get(nodes[0].address.remote())
        report(f"starts {size} ranks")
        # The path of a snapshot, which workers on other nodes do not inherit.
        inherited = {"PYTHONPATH": os.environ["PYTHONPATH"]} if plan.log and "PYTHONPATH" in os.environ else {}
        common = {
            **inherited,
            **plan.environment,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": plan.devices,
            "GROUP_WORLD_SIZE": plan.nodes,
            "MASTER_ADDR": address if plan.nodes > 1 else "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": self._run_id,
            "TORCHELASTIC_RESTART_COUNT": attempt,
        }
        started = []
        for index, actor in enumerate(nodes):
            ranks = [
                {"RANK": index * plan.devices + local, "LOCAL_RANK": local, "GROUP_RANK": index, **common}
                for local in range(plan.devices)
            ]
            variables = [{name: str(value) for name, value in rank.items()} for rank in ranks]
            cwd, log = (os.getcwd(), str(plan.log)) if plan.log else (None, None)
            started.append(actor.start.remote(plan.command, variables, cwd, log))
        ray.get(started)
        return nodes

    def _run_ranks(self, nodes: list[Any]) -> int:
        """Wait until all ranks have ended, and return the exit status of the first one that failed, or 0.

        Raises:
            LostError: It was killed, so that all ranks may start again.
        """
        import ray

        sent, end, failed = 0, float("inf"), dict[int, int]()
        while True:
            for number in self._received[sent:]:
                sent += 1
                report(f"{signal.Signals(number).name}: the run saves and ends")
                ray.get([node.send.remote(number) for node in nodes])
            codes = [code for found in ray.get([node.poll.remote() for node in nodes]) for code in found]
            if time.monotonic() < end:  # later ones are killed here
                for rank in [rank for rank, code in enumerate(codes) if code and rank not in failed]:
                    failed[rank], end = codes[rank], min(end, time.monotonic() + FAILURE_GRACE)
                    report(f"rank {rank} {how_ended(codes[rank])}")
            else:
                ray.get([node.send.remote(signal.SIGKILL) for node in nodes])
            if None not in codes:
                break
            time.sleep(POLL_SECONDS)
        if self._received:
            return next((code for code in codes if code > 0), self._received[-1] + 128)
        if any(code < 0 or code > FIRST_SIGNAL_STATUS for code in failed.values()):
            raise LostError
        return next(iter(failed.values()), 0)


def how_ended(code: int) -> str:
    """Describe an exit code, which is negative or more than 128 if a signal ended the process."""
    if 0 <= code <= FIRST_SIGNAL_STATUS:
        return f"exited with status {code}"
    number = -code if code < 0 else code - FIRST_SIGNAL_STATUS
    known = number in signal.valid_signals()
    return f"was killed by {signal.Signals(number).name if known else f'signal {number}'}"


def missing(plan: Plan, nodes: Sequence[dict[str, float]]) -> str | None:
    """What a cluster lacks for the plan, with the remedy; else None."""
    fitting = [node for node in nodes if all(node.get(name, 0) >= each for name, each in plan.resources.items())]
    if len(fitting) >= plan.nodes:
        return None
    needed = ", ".join(f"{name}: {each:g}" for name, each in plan.resources.items())
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


def run_plan() -> int:
    """Train as the plan on the standard input says, and return the exit status."""
    plan = Plan(**json.loads(sys.stdin.read()))
    if plan.log:
        show_log(plan.log)
    try:
        return Driver(plan).run()
    except ValueError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1 if isinstance(error, ClusterError | UnreachableError) else 2


if __name__ == "__main__":
    sys.exit(run_plan())
