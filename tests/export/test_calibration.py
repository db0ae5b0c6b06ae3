import torch

from boltcutter.export.calibration import stratified


def test_all_classes_are_calibrated_evenly() -> None:
    labels = torch.tensor([0] * 900 + [1] * 90 + [2] * 10)[
        torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    ]
    batches = [((part.float()[:, None],), part) for part in labels.split(64)]
    found = torch.cat([inputs for (inputs,) in stratified(batches, 64)])
    counts = torch.bincount(found[:, 0].long(), minlength=3)
    assert len(found) == 64
    assert counts.min() >= 2
    assert counts[1] > 20  # rather than 6, its part of the data


def test_targets_that_are_no_classes_pass_inputs_on() -> None:
    inputs = (torch.rand(4, 2),)
    for targets in (None, torch.rand(4), torch.zeros(4, 3, dtype=torch.long)):
        ((found,),) = stratified([(inputs, targets)], 9)
        assert torch.equal(found, inputs[0])
        sizes = [len(found) for (found,) in stratified([(inputs, targets)] * 9, 10)]
        assert sizes == [4, 4, 2]
