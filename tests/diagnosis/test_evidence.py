import torch

from boltcutter.diagnosis.evidence import nonzero, overrides, sampled, tensors_of


def test_few_elements_are_sampled_and_those_of_a_sparse_tensor_are_its_values() -> None:
    assert len(sampled(torch.arange(100_000.0))) == 512
    assert sampled(torch.eye(3).to_sparse()).tolist() == [1, 1, 1]
    assert sampled(torch.zeros(3, 4).T).shape == (12,)


def test_samples_of_a_kernel_are_not_all_of_one_corner_nor_those_of_a_matrix_of_one_column() -> None:
    kernel, matrix = torch.arange(9.0).repeat(128 * 64), torch.arange(256.0).repeat(1024)
    assert len(sampled(kernel.view(128, 64, 3, 3)).unique()) == 9
    assert len(sampled(matrix.view(1024, 256)).unique()) > 100


def test_tensors_that_are_not_zero_are_found() -> None:
    tiny = torch.tensor([1e-30], dtype=torch.float32)  # whose square is 0
    assert nonzero([torch.zeros(2), tiny, torch.zeros(0), torch.eye(2).to_sparse()]) == [False, True, False, True]
    assert nonzero([]) == []


def test_the_tensors_of_a_nested_batch_are_found() -> None:
    batch = {"a": [torch.zeros(1), "text"], "b": (None, torch.zeros(2))}
    assert [len(t) for t in tensors_of(batch)] == [1, 2]


def test_hooks_of_either_package_of_lightning_are_found() -> None:
    def hook(module: object) -> None:
        """The one of the base class."""

    named = {"__module__": "pytorch_lightning.core.module", "training_step": hook, "validation_step": hook}
    base = type("LightningModule", (), named)
    module = type("Mine", (base,), {"training_step": lambda module: None})()
    assert overrides(module, "training_step")
    assert not overrides(module, "validation_step")
    assert not overrides(object(), "training_step")
