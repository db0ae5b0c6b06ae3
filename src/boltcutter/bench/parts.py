"""What each part costs at a step: Boltcutter without it, in turn with all of it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from boltcutter.bench import harness
from boltcutter.bench.step import AS_SHIPPED, WORKS

PARTS = {
    "all of it": [],
    "hooks that nobody wrote (Lean)": ["~callback.lean"],
    "fused optimizer": ["optimizer.fused=false"],
    "metrics": ["task.metrics=null"],
    "guard": ["~callback.guard"],
    "preemption": ["~callback.preemption"],
    "reseed": ["~callback.reseed"],
    "throughput": ["~callback.throughput"],
    "progress": ["~callback.progress"],
    "learning rate": ["~callback.learning_rate"],
    "clipping": ["trainer.gradient_clip_val=null"],
    "logging": ["trainer.log_every_n_steps=0", "~callback.learning_rate"],
}


def main(configs: Path, words: list[str]) -> None:
    """Measure processor time on one core; ``work=mlp rounds=3 steps=500 folder=runs/bench`` choose what.

    Raises:
        Failed: A process failed.
    """
    chosen = harness.options(words, {"work": "mlp", "rounds": "3", "steps": "500", "folder": "runs/bench"})
    work, steps = WORKS[chosen["work"]], int(chosen["steps"])
    cpu: dict[str, list[float]] = {part: [] for part in PARTS}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "measured.json"
        window = f"{{_target_: boltcutter.bench.window.Window, file: {file}, warm: {work.warm}, steps: {steps}}}"
        for _ in range(int(chosen["rounds"])):
            for part, without in PARTS.items():
                command = [str(harness.TRAIN), *work.words, *AS_SHIPPED, *without]
                command += [f"+callback.window={window}", f"runs={scratch}"]
                harness.Process(command, harness.cores(1), terminal=True).wait()
                cpu[part].append(harness.measured(file)["cpu"] * 1e6)
    print(f"{chosen['work']}, processor time on one thread: {harness.machine()}")
    whole = min(cpu["all of it"])
    for part, found in cpu.items():
        # The least of the rounds: what disturbs a process only adds.
        beside = "" if part == "all of it" else f"  ({min(found) - whole:+.0f} without it)"
        print(f"{part:32} {min(found):8.0f} µs a step{beside}")
    folder = Path(chosen["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parts.json").write_text(json.dumps({"machine": harness.machine(), "microseconds": cpu}, indent=1))
