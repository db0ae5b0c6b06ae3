from benchmarks import memory
from benchmarks.step import BEST_COMPILED, COMPILED, GUIDE, OURS


def test_eager_and_compiled_loops_are_compared_separately() -> None:
    eager, compiled = memory.compare(
        "resnet", {OURS: [110.0], COMPILED: [180.0], GUIDE: [100.0], BEST_COMPILED: [150.0]}
    )
    assert (eager.value, eager.met) == (1.1, True)
    assert (compiled.value, compiled.met) == (1.2, False)
    assert len(memory.compare("mlp", {OURS: [1.0], GUIDE: [1.0]})) == 1
