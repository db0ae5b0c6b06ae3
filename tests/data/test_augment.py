from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from fake_gpu import FakeStrategy, fake_gpu
from torch import Tensor

from boltcutter.callback.prefetch import Prefetch
from boltcutter.callback.reseed import Reseed
from boltcutter.data.augment import Augment, uniform
from boltcutter.data.digits import Digits
from boltcutter.data.module import BatchedTensorDataset, Splits
from boltcutter.data.sampler import Batch, BatchSampler
from boltcutter.model.linear import Linear
from boltcutter.task.classification import Classification

ALL = Augment(flip=0.5, shift=3, brightness=0.4, contrast=0.4)
EACH = [
    Augment(flip=0.5),
    Augment(shift=3),
    Augment(brightness=0.4),
    Augment(contrast=0.4),
    ALL,
]


def images(count: int, channels: int = 3, height: int = 13, width: int = 17) -> Tensor:
    return torch.randint(0, 256, (count, channels, height, width), generator=torch.Generator().manual_seed(0)).byte()


@pytest.mark.parametrize("augment", EACH)
@pytest.mark.parametrize("size", [(1, 28, 28), (3, 13, 17), (3, 96, 96)])
def test_augmentation_does_not_depend_on_the_batch(augment: Augment, size: tuple[int, int, int]) -> None:
    inputs = images(41, *size)
    together = augment(inputs, Batch(range(41), seed=1, epoch=2))
    assert (together.dtype, together.shape) == (torch.uint8, inputs.shape)
    for indices in ([5], [40, 5], list(range(0, 41, 3)), list(range(40, -1, -1))):
        assert torch.equal(augment(inputs[indices], Batch(indices, seed=1, epoch=2)), together[indices])


@pytest.mark.parametrize("augment", EACH)
def test_augmentation_depends_on_epoch_and_seed_and_copies_its_inputs(augment: Augment) -> None:
    inputs = images(20)
    before = inputs.clone()
    first = augment(inputs, Batch(range(20), seed=1, epoch=0))
    assert torch.equal(inputs, before)
    assert not torch.equal(first, inputs)
    assert torch.equal(first, augment(inputs, Batch(range(20), seed=1, epoch=0)))
    assert not torch.equal(first, augment(inputs, Batch(range(20), seed=1, epoch=1)))
    assert not torch.equal(first, augment(inputs, Batch(range(20), seed=2, epoch=0)))


def test_default_settings_change_nothing() -> None:
    inputs = images(8)
    assert torch.equal(Augment()(inputs, Batch(range(8))), inputs)
    tiny = Augment(brightness=1e-9, contrast=1e-9)
    assert torch.equal(tiny(inputs, Batch(range(8))), inputs)


def test_half_the_images_are_flipped() -> None:
    inputs = images(1000)
    out = Augment(flip=0.5)(inputs, Batch(range(1000)))
    mirrored = (out == inputs.flip(3)).flatten(1).all(1)
    kept = (out == inputs).flatten(1).all(1)
    assert (mirrored ^ kept).all()
    assert 430 < mirrored.sum() < 570
    assert torch.equal(Augment(flip=1)(inputs, Batch(range(1000))), inputs.flip(3))


def test_shift_draws_every_offset_and_pads_with_zeros() -> None:
    inputs = images(400, 1, 9, 9) | 1  # no zeros inside
    out = Augment(shift=2)(inputs, Batch(range(400)))
    padded = torch.nn.functional.pad(inputs, (2, 2, 2, 2))
    seen = set()
    for image, wide in zip(out, padded, strict=True):
        at = [(y, x) for y in range(5) for x in range(5) if torch.equal(image, wide[:, y : y + 9, x : x + 9])]
        assert len(at) == 1
        seen.update(at)
    assert len(seen) == 25


def test_flipped_images_are_shifted_in_the_same_direction() -> None:
    inputs = images(50)
    batch = Batch(range(50))
    assert torch.equal(Augment(flip=1, shift=2)(inputs, batch), Augment(shift=2)(inputs.flip(3), batch))


def test_brightness_and_contrast_stay_within_their_bounds() -> None:
    inputs = torch.full((500, 1, 4, 4), 100, dtype=torch.uint8)
    bright = Augment(brightness=0.3)(inputs, Batch(range(500)))[:, 0, 0, 0]
    assert 69 <= bright.min() <= 72
    assert 128 <= bright.max() <= 131
    inputs[:, :, :2] = 60
    out = Augment(contrast=0.5)(inputs, Batch(range(500))).float()
    assert (out.mean(dim=(1, 2, 3)) - 80).abs().max() <= 1
    spread = out[:, 0, 3, 3] - out[:, 0, 0, 0]
    assert 19 <= spread.min() <= 23
    assert 57 <= spread.max() <= 61
    white = Augment(brightness=1)(torch.full((50, 1, 2, 2), 255, dtype=torch.uint8), Batch(range(50)))
    assert (white == 255).flatten(1).all(1).any()  # clipped at 255, not wrapped around


@pytest.mark.parametrize("settings", [{"flip": 1.5}, {"shift": -1}, {"contrast": -1}])
def test_invalid_settings_are_an_error(settings: dict[str, float]) -> None:
    name, value = next(iter(settings.items()))
    with pytest.raises(ValueError, match=rf"^data.augment.{name}={value} is .+; (try|give) .+$"):
        Augment(**settings)  # type: ignore[arg-type]


def test_random_numbers_depend_on_the_sample_not_on_the_batch() -> None:
    together = uniform(Batch(range(100), seed=1, epoch=2), 3)
    for index in (0, 41, 99):
        assert np.array_equal(uniform(Batch([7, index], seed=1, epoch=2), 3)[1], together[index])
    assert not np.isin(uniform(Batch(range(100), seed=1, epoch=3), 3), together).any()
    assert not np.isin(uniform(Batch(range(100), seed=2, epoch=2), 3), together).any()


def test_random_numbers_are_uniform() -> None:
    drawn = uniform(Batch(range(50_000), seed=0, epoch=0), 2)
    assert drawn.dtype == np.float32
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.histogram(drawn[:, 0], 10, (0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < 27.9  # chi-square with 9 degrees of freedom, 99.9 %
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.02
    assert abs(np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]) < 0.02


class Shifted(Digits):
    """Digits that are flipped and shifted, where they are read or on the device; remembers what training gets."""

    def __init__(self, *, on_device: bool, **options: Any) -> None:
        super().__init__(batch_size=200, **options)
        self.augment = Augment(flip=0.5, shift=2, brightness=0.3, contrast=0.3, on_device=on_device)

    def load(self) -> Splits:
        train, val, test = super().load()
        assert isinstance(train, BatchedTensorDataset)
        return Splits(BatchedTensorDataset(train.inputs, train.targets, self.augment), val, test)


class Seen(Classification):
    def __init__(self) -> None:
        L.seed_everything(0, verbose=False)
        super().__init__(Linear((1, 8, 8), 10), optimizer=torch.optim.SGD)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch[0])
        return super().training_step(batch, batch_idx)


class Saves(L.Callback):
    """Saves a checkpoint after four batches."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.path)


def trained(
    *, on_device: bool, steps: int = -1, ckpt: Path | None = None, saves: L.Callback | None = None, **options: Any
) -> tuple[L.Trainer, Seen]:
    silent: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    silent |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "accelerator": "cpu"}
    trainer = L.Trainer(
        max_epochs=2, max_steps=steps, callbacks=[Reseed(), Prefetch(2), saves or L.Callback()], **silent | options
    )
    module = Seen()
    trainer.fit(module, datamodule=Shifted(on_device=on_device), ckpt_path=ckpt, weights_only=True)
    return trainer, module


@pytest.mark.filterwarnings("ignore")
def test_images_are_the_same_where_they_are_read_and_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, host = trained(on_device=False)
    _, device = trained(on_device=True)
    assert len(host.seen) == len(device.seen) == 12
    assert all(torch.equal(a, b) for a, b in zip(host.seen, device.seen, strict=True))
    assert not torch.equal(host.seen[0], host.seen[6])
    assert device.seen[0].dtype == torch.uint8
    trainer, _ = trained(on_device=True, steps=4)
    trainer.save_checkpoint(tmp_path / "end.ckpt")  # Lightning counts this epoch as done
    _, rest = trained(on_device=True, ckpt=tmp_path / "end.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(host.seen[4:6], rest.seen, strict=True))
    trained(on_device=True, saves=Saves(tmp_path / "mid.ckpt"))
    _, resumed = trained(on_device=True, ckpt=tmp_path / "mid.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(host.seen[4:], resumed.seen, strict=True))
    with monkeypatch.context() as patch, fake_gpu(patch):
        _, gpu = trained(on_device=True, strategy=FakeStrategy())
        assert all(inputs.is_cuda for inputs in gpu.seen)
        assert all(torch.equal(a, b.host) for a, b in zip(host.seen, gpu.seen, strict=True))  # type: ignore[attr-defined]


def test_each_rank_has_the_positions_of_its_samples() -> None:
    for rank in range(2):
        sampler = BatchSampler(11, 4, seed=3, rank=rank, world_size=2, shuffle=True)
        for number, batch in enumerate(sampler):
            assert sampler.batch_at(number).positions.tolist() == batch.positions.tolist()
            assert sampler.batch_at(number).stream(1) == batch.stream(1)
