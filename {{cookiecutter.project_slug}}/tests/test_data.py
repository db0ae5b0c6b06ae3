"""The data are what training expects."""

import boltcutter
import torch
from conftest import Train


def test_splits_are_finite_and_share_no_samples(train: Train) -> None:
    _, data = boltcutter.load(train("experiment=baseline", "trainer.max_steps=1"), ckpt="last")
    seen: set[bytes] = set()
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        inputs = torch.cat([batch[0] for batch in loader])
        assert inputs.isfinite().all()
        samples = {sample.numpy().tobytes() for sample in inputs}
        assert not samples & seen
        seen |= samples
