import torch
from planted import BAD
from replay.conftest import Replayed


def test_a_step_is_traced_in_its_order(replayed: Replayed) -> None:
    found = torch.load(replayed.folder / "trace-rank-0.pt", weights_only=True)
    kinds = list(dict.fromkeys(entry["kind"] for entry in found))
    assert kinds[:5] == ["weight before", "samples", "input", "output", "gradient"]
    assert BAD in next(entry["indices"] for entry in found if entry["kind"] == "samples")
    assert [entry["name"] for entry in found if entry["kind"] == "output"] == ["net.0", "net.1", "net.2", "net"]
    assert all(entry["digest"] for entry in found)
