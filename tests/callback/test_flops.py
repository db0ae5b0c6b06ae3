import pytest
import torch
from torch import Tensor, nn

from boltcutter.callback.flops import count_flops, meta_copy, peak_flops


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", 312e12),
        ("NVIDIA A100-SXM4-80GB", "32-true", 19.5e12),
        ("NVIDIA H100 PCIe", "bf16-true", 756e12),
        ("NVIDIA H100 80GB HBM3", "16-mixed", 989.4e12),
        ("NVIDIA H200", "bf16-mixed", 989.4e12),
        ("NVIDIA L40S", "bf16-mixed", 362e12),
        ("NVIDIA L4", "bf16-mixed", 121e12),
        ("NVIDIA GeForce RTX 4090", "bf16-mixed", 165.2e12),
        ("Tesla T4", "16-mixed", 65e12),
        ("Tesla T4", "bf16-mixed", None),
        ("Tesla V100-SXM2-16GB", "16-true", 125e12),
        ("NVIDIA A100-SXM4-80GB", "64-true", None),
        ("NVIDIA A1000", "bf16-mixed", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16-mixed", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16-mixed", None),
        ("NVIDIA GB200", "bf16-mixed", 2500e12),
        ("NVIDIA B300 SXM6 AC", "bf16-mixed", 2250e12),
        ("NVIDIA H20", "bf16-mixed", 148e12),
        ("NVIDIA H800", "bf16-mixed", 989.4e12),
        ("NVIDIA L20", "bf16-mixed", 119.5e12),
        ("NVIDIA RTX 6000 Ada Generation", "bf16-mixed", 364.2e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "bf16-mixed", 503.8e12),
        ("AMD Instinct MI300X", "bf16-mixed", None),
    ],
)
def test_the_peak_is_that_of_the_device(device: str, precision: str, expected: float | None) -> None:
    assert peak_flops(device, precision) == expected


def test_tf32_is_used_if_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_flops("NVIDIA A100-SXM4-80GB", "32-true") == 156e12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(64, 192), nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x.transpose(1, 2)).transpose(1, 2))[:, None].chunk(3, dim=-1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def count(model: nn.Module, inputs: Tensor) -> float | None:
    meta = meta_copy(model)
    assert meta is not None
    return count_flops(meta, inputs)


def test_flops_match_the_formula() -> None:
    model, batch, length = Attention(), 3, 16
    before = {name: value.clone() for name, value in model.state_dict().items()}
    linear, products = 2 * batch * length * 64 * 192, 2 * 2 * batch * length * length * 64
    assert count(model, torch.zeros(batch, length, 64)) == 3 * (linear + products)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    convolution = nn.Conv2d(3, 8, 3, padding=1)
    assert count(convolution, torch.zeros(2, 3, 10, 10)) == 3 * 2 * (2 * 8 * 100) * 27


class DataDependent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x


def test_a_model_of_lazy_layers_is_not_copied() -> None:
    assert meta_copy(nn.Sequential(nn.Flatten(), nn.LazyLinear(2))) is None


def test_a_model_with_data_dependent_control_flow_is_not_counted() -> None:
    assert count(DataDependent(), torch.ones(2)) is None
