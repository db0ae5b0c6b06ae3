"""Transformer blocks with causal self-attention, and their tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

KeyValue = tuple[Tensor, Tensor]  # keys and values of one layer, (B, G, positions, D) each


class Block(nn.Module):
    """A transformer block: attention, then an MLP, each with pre-normalization and a residual connection.

    Shapes: B batch, T sequence length, C hidden size, H query heads, G key-value heads, D head size.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        gated: bool,
        norm: Literal["rmsnorm", "layernorm"],
        bias: bool,
        dropout: float,
        activation_checkpointing: bool,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, hidden_size // num_heads
        self.intermediate_size, self.gated, self.attention_dropout = intermediate_size, gated, dropout
        self.activation_checkpointing = activation_checkpointing
        self.attention_norm, self.mlp_norm = (make_norm(norm, hidden_size, bias) for _ in range(2))
        self.qkv_proj = nn.Linear(hidden_size, (num_heads + 2 * num_kv_heads) * self.head_size, bias)
        self.out_proj = _make_branch_output(hidden_size, hidden_size, bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size * (2 if gated else 1), bias)
        self.down_proj = _make_branch_output(intermediate_size, hidden_size, bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, rope: Tensor | None, past: KeyValue | None, *, use_cache: bool
    ) -> tuple[Tensor, KeyValue | None]:
        """Return x (B, T, C) and, with ``use_cache``, all keys and values so far (B, G, positions, D)."""
        if self.activation_checkpointing and not use_cache and torch.is_grad_enabled():
            output: Tensor = checkpoint(self._forward, x, rope, past, use_reentrant=False)[0]
            return output, None
        x, key_value = self._forward(x, rope, past)
        return x, key_value if use_cache else None

    def _forward(self, x: Tensor, rope: Tensor | None, past: KeyValue | None) -> tuple[Tensor, KeyValue]:
        attended, key_value = self.attend(self.attention_norm(x), rope, past)
        x = x + self.dropout(self.out_proj(attended))
        hidden = self.up_proj(self.mlp_norm(x))
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * hidden
        else:
            hidden = F.gelu(hidden)
        return x + self.dropout(self.down_proj(hidden)), key_value

    def attend(self, x: Tensor, rope: Tensor | None, past: KeyValue | None) -> tuple[Tensor, KeyValue]:
        """Apply causal self-attention, and return its output with the keys and values of all positions so far."""
        batch, length, _ = x.shape
        h, g = self.num_heads, self.num_kv_heads
        q, k, v = (
            self.qkv_proj(x).view(batch, length, h + 2 * g, self.head_size).transpose(1, 2).split([h, g, g], dim=1)
        )
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        # A single new position attends to all others; several new ones after cached ones need an explicit mask.
        mask = None
        if past is not None and length > 1:
            offset = k.size(2) - length
            mask = torch.ones(length, offset + length, dtype=torch.bool, device=x.device).tril(offset)
        dropout = self.attention_dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=past is None, enable_gqa=h != g
        )  # (B, H, T, D)
        return out.transpose(1, 2).reshape(batch, length, h * self.head_size), (k, v)

    def make_row_permutations(self, ranks: int) -> dict[str, Tensor]:
        """Return permutations of the rows of fused matrices, such that an even split gives each rank complete heads.

        Raises:
            ValueError: The number of heads or hidden units is not divisible by ``ranks``.
        """
        h, g = self.num_heads, self.num_kv_heads
        for name, count in (("num_heads", h), ("num_kv_heads", g), ("intermediate_size", self.intermediate_size)):
            if count % ranks:
                raise ValueError(
                    f"trainer.strategy.tensor_parallel_size={ranks} does not divide model.{name}={count}; "
                    f"try model.{name}={count + -count % ranks}"
                )
        permutations = {"qkv_proj": section_permutation([n * self.head_size for n in (h, g, g)], ranks)}
        return permutations | (
            {"up_proj": section_permutation([self.intermediate_size] * 2, ranks)} if self.gated else {}
        )


def rope_table(length: int, size: int) -> Tensor:
    """Return cosines and sines (2, T, D) of the rotation angle of each position and dimension."""
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies  # (T, D / 2)
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()]).float()


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate each pair of dimensions (i, i + D / 2) of (B, H, T, D)."""
    first, second = x.chunk(2, dim=-1)
    return x * rope[0] + torch.cat([-second, first], dim=-1) * rope[1]


def make_norm(kind: Literal["rmsnorm", "layernorm"], size: int, bias: bool) -> nn.Module:
    """Return an RMSNorm or LayerNorm over the last dimension, of ``size``."""
    return nn.RMSNorm(size, eps=1e-5) if kind == "rmsnorm" else nn.LayerNorm(size, bias=bias)


def _make_branch_output(in_features: int, out_features: int, bias: bool) -> nn.Linear:
    """Return the last linear layer of a residual branch, marked for its smaller initialization."""
    linear = nn.Linear(in_features, out_features, bias)
    linear.ends_branch = True  # type: ignore[assignment]
    return linear


def section_permutation(sections: Sequence[int], ranks: int) -> Tensor:
    """Return a permutation of rows such that an even split gives each rank an equal part of each section."""
    chunks = [rows.chunk(ranks) for rows in torch.split(torch.arange(sum(sections)), list(sections))]
    return torch.cat([section[rank] for rank in range(ranks) for section in chunks])


def replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Turn parameters into replicated DTensors, which mix with sharded ones; ``module`` still takes plain tensors."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_module

    def to_replicated(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in inputs)

    def to_local(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local()

    distribute_module(module, mesh, None, to_replicated, to_local)
