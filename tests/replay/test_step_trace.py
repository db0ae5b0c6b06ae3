import torch
from planted import BAD
from replay.conftest import Replayed


def test_a_step_is_traced_in_its_order(replayed: Replayed) -> None:
    found = torch.load(replayed.folder / "trace-rank-0-step-8.pt", weights_only=True)
    kinds = list(dict.fromkeys(entry["kind"] for entry in found))
    assert kinds == [
        *("initial weight", "samples", "input", "module input", "module", "loss", "gradient", "weight gradient"),
        *("option", "used gradient", "weight", "state"),
    ]
    indices = next(entry["indices"] for entry in found if entry["kind"] == "samples")
    assert len(indices) == 16
    assert BAD not in indices  # it is in the next batch
    assert [entry["name"] for entry in found if entry["kind"] == "module"] == ["net.0", "net.1", "net.2", "net"]
    assert next(entry["name"] for entry in found if entry["kind"] == "weight gradient") == "net.2.bias"
    assert {entry["name"].partition(" ")[0] for entry in found if entry["kind"] == "option"} >= {"lr", "betas"}
    before, after = ({e["name"]: e for e in found if e["kind"] == kind} for kind in ("initial weight", "weight"))
    assert before.keys() == after.keys()
    assert all(before[name]["digest"] != after[name]["digest"] for name in before)
    assert not torch.equal(before["net.0.weight"]["values"], after["net.0.weight"]["values"])
