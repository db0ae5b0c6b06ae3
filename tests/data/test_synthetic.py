from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from boltcutter.config.instantiate import build
from boltcutter.config.settings import Settings
from boltcutter.data.sampler import Batch
from boltcutter.data.synthetic import Synthetic

CONFIGS = Path(__file__).parents[2] / "configs" / "data"


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("shape", [(7,), (1, 28, 28), (3, 4, 5, 6)])
def test_samples_have_the_given_shape_and_dtype(dtype: str, shape: tuple[int, ...]) -> None:
    data = Synthetic(shape=shape, dtype=dtype, num_samples=100, num_classes=4)  # type: ignore[arg-type]
    inputs, targets = next(iter(data.train_dataloader()))
    assert (inputs.shape, inputs.dtype) == ((64, *shape), getattr(torch, dtype))
    assert (targets.shape, targets.dtype) == ((64,), torch.int64)
    assert set(targets.tolist()) == {0, 1, 2, 3}
    assert data.splits is not None
    assert [len(split) for split in data.splits] == [100, 10, 10]


def test_regression_targets_are_floats() -> None:
    data = Synthetic(kind="regression", num_classes=3, num_samples=64)
    _, targets = next(iter(data.train_dataloader()))
    assert (targets.shape, targets.dtype) == ((64, 3), torch.float32)
    assert data.kind == "regression"
    assert data.classes == []


def test_noise_is_a_pure_function_of_seed_and_index() -> None:
    assert Synthetic(num_samples=20).fingerprint() == Synthetic(num_samples=20).fingerprint()
    assert Synthetic(num_samples=20).fingerprint() != Synthetic(num_samples=20, seed=1).fingerprint()
    data, held = Synthetic(num_samples=2000), Synthetic(num_samples=2000, in_memory=True)
    for module in (data, held):
        module.setup("fit")
        assert module.splits is not None
    train, val, test = data.splits  # type: ignore[misc]
    assert val.fingerprint() != test.fingerprint()
    inputs, targets = train.__getitems__(Batch(range(2000), seed=3, epoch=4))
    assert inputs.float().mean() == pytest.approx(127.5, abs=1)
    assert torch.bincount(targets).tolist() == pytest.approx([200] * 10, abs=60)
    assert len(torch.unique(inputs.flatten(1), dim=0)) > 1990
    one, target = train.__getitems__(Batch([77]))
    assert torch.equal(one[0], inputs[77])
    assert target[0] == targets[77]
    assert torch.equal(held.splits.train.inputs, inputs)  # type: ignore[union-attr]
    assert not torch.equal(val.__getitems__(Batch([77]))[0], one)


def test_normal_noise_has_mean_0_and_deviation_1() -> None:
    data = Synthetic(num_samples=500, dtype="float32", kind="regression", num_classes=3)
    data.setup("fit")
    inputs, targets = data.splits.train.__getitems__(Batch(range(500)))  # type: ignore[union-attr]
    for values in (inputs, targets):
        assert values.mean() == pytest.approx(0, abs=0.1)
        assert values.std() == pytest.approx(1, abs=0.1)


def test_memory_does_not_depend_on_the_number_of_samples() -> None:
    data = Synthetic(num_samples=10**8, shape=(100, 100))
    loader = data.train_dataloader()
    inputs, _ = next(iter(loader))
    assert inputs.shape == (64, 100, 100)
    assert len(loader) == 10**8 // 64
    assert sum(split.inputs.nbytes for split in data.splits) < 2e7  # type: ignore[union-attr]


def test_invalid_settings_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"data.shape=\[0\] must be sizes of 1 or more"):
        Synthetic(shape=(0,))
    with pytest.raises(ValueError, match=r"data.num_samples=0"):
        Synthetic(num_samples=0)


def test_the_option_builds() -> None:
    cfg = Settings({"seed": 3, "data": OmegaConf.load(CONFIGS / "synthetic.yaml")})
    data = build(cfg.data, "data")
    assert (data.shape, data.seed, data.num_samples) == ((1, 28, 28), 3, 10_000)
