"""Plant one difference between two runs, and ask ``boltcutter bisect``: the tables of docs/bisect.md.

python scripts/studies/planted_differences.py [<difference> …]
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

TESTS = Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(TESTS))

from planted_pairs import CHANGED, EQUAL, PAIRS, Pair, PairProject, pythons  # noqa: E402

import boltcutter.training.train  # noqa: E402, F401  # imported once, before runs are forked
from boltcutter.project import Project  # noqa: E402
from boltcutter.replay.bisection import Answer, Bisection, text  # noqa: E402
from boltcutter.replay.job import Workers  # noqa: E402
from boltcutter.replay.traces import Place  # noqa: E402


def has_right_step(pair: Pair, answer: Answer) -> bool:
    """Whether the step, and what of it differs first, are those of the planted difference."""
    place = answer.places[0] if answer.places else Place("", "", "")
    is_step = answer.step == pair.step if pair.step else place.index == CHANGED
    return is_step and pair.kind in place.kind and pair.name in place.name


def has_right_cause(pair: Pair, answer: Answer) -> bool:
    """Whether the planted difference is the only cause that is named."""
    return len(answer.causes) == 1 and pair.cause in answer.causes[0]


def main() -> None:
    """Print a row for each difference, and for each pair of equal runs."""
    chosen = sys.argv[1:] or [*PAIRS, *EQUAL]
    steps = causes = equal = 0
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        project, workers = PairProject(Path(scratch)), Workers(stack)
        os.chdir(project.root)
        base = project.scratch / "runs" / "base"
        project.train(base, Pair(), 0)

        def ask(name: str, pair: Pair) -> Answer:
            first, second = project.make(name, pair, base)
            given = pythons(pair, project)
            return Bisection(Project.find(project.root), (first, second), given, workers).answer()

        print("| difference | step | what of it differs first | cause | right | seconds |\n|---|---|---|---|---|---|")
        for name in (name for name in PAIRS if name in chosen):
            begin, answer = monotonic(), ask(name, PAIRS[name])
            right = has_right_step(PAIRS[name], answer), has_right_cause(PAIRS[name], answer)
            steps, causes = steps + right[0], causes + right[1]
            place = f"{answer.places[0].kind}: {answer.places[0].name}" if answer.places else ", ".join(answer.columns)
            cause = " and ".join(f"`{cause}`" for cause in answer.causes)
            cells = (name, answer.step, place, cause, "yes" if all(right) else "no", f"{monotonic() - begin:.0f}")
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
            if not all(right):
                print(name, *text(answer), sep="\n", file=sys.stderr, flush=True)
        print("\n| equal runs | differs |\n|---|---|")
        for name in (name for name in EQUAL if name in chosen):
            answer = ask(name, EQUAL[name])
            equal += answer.equal
            print(f"| {name} | {'no' if answer.equal else 'yes'} |", flush=True)
            if not answer.equal:
                print(name, *text(answer), sep="\n", file=sys.stderr, flush=True)
    counts = [sum(name in chosen for name in names) for names in (PAIRS, EQUAL)]
    print(f"\nsteps {steps} of {counts[0]}, causes {causes} of {counts[0]}; equal {equal} of {counts[1]}")


if __name__ == "__main__":
    main()
