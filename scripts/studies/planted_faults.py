"""Plant faults whose causes are known, and ask ``boltcutter why``: the table of docs/why.md.

python scripts/studies/planted_faults.py [<fault> …]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from time import monotonic

TESTS = Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(TESTS))

from planted import BAD, FAULTS, forked, overrides, write_project  # noqa: E402

from boltcutter.project import Project  # noqa: E402
from boltcutter.replay.job import Surroundings, worker  # noqa: E402
from boltcutter.replay.question import ask  # noqa: E402
from boltcutter.replay.why import Answer, Case  # noqa: E402
from boltcutter.run.folder import read_record  # noqa: E402
from boltcutter.training import train  # noqa: E402

OTHERS = ((2, 0), (1, 2), (2, 2))  # ranks and workers, by turns
AGAIN: tuple[str, ...] = (
    "nan-input",
    "log-of-zero",
    "outlier-target",
    "constant",
    "root-of-zero",
    "rate-too-high",
    "weight-lost",
    "code",
)
AGAIN += ("augmentation", "outlier-input", "constant-batch", "out-of-range", "unreadable")


def is_right(fault: str, answer: Answer) -> bool:
    """Whether the cause is that which was planted, and no other sample is named."""
    culprits = {row.get("index") for row in answer.samples} if answer.cause == "sample" else set()
    known = {BAD, BAD + 1} if fault == "two-samples" else {BAD}
    return answer.cause == FAULTS[fault] and culprits <= known and answer.exact


def main() -> None:
    """Print a row for each fault."""
    cases = [(fault, 1, 0) for fault in FAULTS]
    cases += [(fault, *OTHERS[number % len(OTHERS)]) for number, fault in enumerate(AGAIN)]
    if chosen := set(sys.argv[1:]):
        cases = [case for case in cases if case[0] in chosen]
    right = 0
    with tempfile.TemporaryDirectory() as scratch:
        root = write_project(Path(scratch, "project"))
        os.environ["PYTHONPATH"] = str(root)
        os.chdir(root)
        project = Project.find(None)
        print(
            "| fault | ranks | workers | step | answer | sample | right | seconds |\n|---|---|---|---|---|---|---|---|"
        )
        with worker(Surroundings(project, project.root, 1), {"attempts": [{"device": "cpu", "seconds": 1}]}) as started:
            for fault, ranks, workers in cases:
                folder = Path(scratch, "runs", f"{fault}-{ranks}-{workers}")
                log = os.open(f"{scratch}/log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                forked(quietly, log, project, overrides(fault, folder, ranks, workers))
                os.close(log)
                begin = monotonic()
                answer = Case(project, folder, ask(folder, read_record(folder), None), started).answer()
                right += (good := is_right(fault, answer))
                samples = ", ".join(str(row.get("index")) for row in answer.samples) if answer.cause == "sample" else ""
                cells = (
                    fault,
                    ranks,
                    workers,
                    answer.step,
                    answer.cause or "nothing unusual",
                    samples,
                    "yes" if good else "no",
                )
                print("| " + " | ".join(map(str, (*cells, f"{monotonic() - begin:.0f}"))) + " |", flush=True)
                if not good:
                    print(
                        fault,
                        ranks,
                        workers,
                        *answer.lines,
                        *answer.changes,
                        answer.exactness,
                        sep="\n",
                        file=sys.stderr,
                        flush=True,
                    )
    print(f"\n{right} of {len(cases)}")


def quietly(log: int, project: Project, arguments: list[str]) -> None:
    """Train, with the output in a file."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    project.activate()
    train.train_command(project, arguments)


if __name__ == "__main__":
    main()
