"""A decoder-only transformer over tokens."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

Cache = list[tuple[Tensor, Tensor]]


class GPT(nn.Module):
    """Predicts the next token at each position, from it and those before it.

    B batch, T positions, C width, H heads, G heads of keys and values, D width of a head, V tokens of the vocabulary.
    Every linear map and embedding begins with deviation 0.02, those that end a residual branch with that over
    √(2 · layers).

    Args:
        inputs: Shape of one sample: (T,), the longest context.
        outputs: V.
        layers: Number of blocks, each of attention and MLP.
        heads: H; they share the width.
        kv_heads: G, which H must be a multiple of; none means H.
        width: C.
        hidden: Width inside the MLP; none means 4 C, and for SwiGLU two thirds of it, in steps of 64.
        norm: Root mean square, or LayerNorm; before each branch and at the end.
        position: Rotations of keys and queries, or an embedding for each position.
        mlp: SwiGLU, or two layers with GELU.
        bias: Whether linear maps and LayerNorms have biases.
        tied: Whether the embedding of tokens is also the last layer.
        dropout: Share dropped of embeddings, attention and branches while training.

    Raises:
        ValueError: Sizes do not go together.

    Source: Vaswani et al., Attention Is All You Need, 2017; Radford et al., Language Models are Unsupervised Multitask
    Learners, 2019 (norms before branches, initialisation); Press & Wolf, Using the Output Embedding to Improve Language
    Models, 2017 (tied); Zhang & Sennrich, Root Mean Square Layer Normalization, 2019; Su et al., RoFormer, 2021
    (rotary); Shazeer, GLU Variants Improve Transformer, 2020; Ainslie et al., GQA, 2023.
    """

    caches = True  # may be called with a cache
    rotations: Tensor | None

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: int,
        *,
        layers: int = 4,
        heads: int = 4,
        kv_heads: int | None = None,
        width: int = 128,
        hidden: int | None = None,
        norm: Literal["rms", "layer"] = "rms",
        position: Literal["rotary", "learned"] = "rotary",
        mlp: Literal["swiglu", "gelu"] = "swiglu",
        bias: bool = False,
        tied: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _check(inputs, layers, heads, kv_heads or heads, width, position, dropout)
        gated = mlp == "swiglu"
        inner = hidden or (64 * math.ceil(8 * width / 3 / 64) if gated else 4 * width)
        self.context, self.layers = inputs[0], layers
        self.tokens = nn.Embedding(outputs, width)
        self.positions = nn.Embedding(self.context, width) if position == "learned" else None
        self.dropout = nn.Dropout(dropout)
        made: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads or heads, "bias": bias, "dropout": dropout}
        self.blocks = nn.ModuleList(Block(width, inner, gated=gated, norm=norm, **made) for _ in range(layers))
        self.norm = _norm(norm, width, bias)
        self.head = None if tied else nn.Linear(width, outputs, bias=False)
        rotations = _rotations(self.context, width // heads) if position == "rotary" else None
        self.register_buffer("rotations", rotations, persistent=False)  # (2, T, D)
        self.apply(self._initialize)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits of the token that follows each position.

        Args:
            tokens: Whole numbers (B, T); after those that are in the cache.
            cache: Keys and values of the positions before, of each layer, to which those of ``tokens`` are added; empty
                at first.

        Returns:
            Shape (B, T, V).

        Raises:
            ValueError: There are more positions than the context has.
        """
        before = cache[0][0].size(2) if cache else 0
        end = before + tokens.size(1)
        if end > self.context:
            raise ValueError(f"model.inputs=[{self.context}], but {end} tokens came; give a longer context")
        x = self.tokens(tokens.long())  # (B, T, C)
        if self.positions is not None:
            x = x + self.positions.weight[before:end]
        x = self.dropout(x)
        rotations = None if self.rotations is None else self.rotations[:, before:end].to(x.dtype)
        for number, block in enumerate(self.blocks):
            x, kept = block(x, rotations, cache[number] if before and cache else None, keep=cache is not None)
            if cache is not None:
                cache[number : number + 1] = [kept]
        x = self.norm(x)
        logits: Tensor = F.linear(x, self.tokens.weight) if self.head is None else self.head(x)
        return logits

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Weights that decay, then those that do not: embeddings, norms and biases.

        Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization, 2019; OLMo team, 2 OLMo 2 Furious, 2025
        (embeddings left out).
        """
        embeddings = {id(m.weight) for m in self.modules() if isinstance(m, nn.Embedding)}
        trained = [p for p in self.parameters() if p.requires_grad]
        decay = [p.ndim > 1 and id(p) not in embeddings for p in trained]
        groups: list[dict[str, Any]] = [
            {"params": [p for p, decays in zip(trained, decay, strict=True) if decays]},
            {"params": [p for p, decays in zip(trained, decay, strict=True) if not decays], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def shard(self, mesh: DeviceMesh) -> None:
        """Cut each block, and then the rest, over the ranks of ``mesh``.

        Raises:
            ValueError: Matrices are to be cut; queries, keys and values share one.

        Source: Zhao et al., PyTorch FSDP, 2023.
        """
        from torch.distributed.fsdp import fully_shard

        if mesh["tensor_parallel"].size() > 1:
            raise ValueError(
                "trainer.strategy.tensor_parallel_size: model=gpt is cut between its layers alone; "
                "set tensor_parallel_size=1"
            )
        for block in self.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(self, mesh=mesh["data_parallel"])

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            std = 0.02 / math.sqrt(2 * self.layers) if getattr(module, "ends_branch", False) else 0.02
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class Block(nn.Module):
    """Attention, then an MLP, each added to what came in.

    Args:
        width: C.
        hidden: Inside the MLP.
        heads: H.
        kv_heads: G.
        gated: SwiGLU in place of GELU.
        norm: Of what a branch takes.
        bias: Whether linear maps have one.
        dropout: Of attention and of each branch.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        heads: int,
        kv_heads: int,
        gated: bool,
        norm: Literal["rms", "layer"],
        bias: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.gated, self.share = heads, kv_heads, gated, dropout
        size = width // heads
        self.norm_attention, self.norm_mlp = _norm(norm, width, bias), _norm(norm, width, bias)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * size, bias)
        self.attended = _ending(width, width, bias)
        self.widen = nn.Linear(width, hidden * (2 if gated else 1), bias)
        self.narrow = _ending(hidden, width, bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, rotations: Tensor | None, before: tuple[Tensor, Tensor] | None, *, keep: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Give x (B, T, C), and the keys and values (B, G, positions, D) so far if they are to be kept."""
        attended, kept = self.attend(self.norm_attention(x), rotations, before)
        x = x + self.dropout(self.attended(attended))
        inner = self.widen(self.norm_mlp(x))
        if self.gated:
            gate, inner = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * inner
        else:
            inner = F.gelu(inner)
        return x + self.dropout(self.narrow(inner)), kept if keep else None

    def attend(
        self, x: Tensor, rotations: Tensor | None, before: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Softmax attention of each position to itself and those before it."""
        batch, length, width = x.shape
        h, g = self.heads, self.kv_heads
        q, k, v = self.qkv(x).view(batch, length, h + 2 * g, width // h).transpose(1, 2).split([h, g, g], dim=1)
        if rotations is not None:
            q, k = _rotate(q, rotations), _rotate(k, rotations)
        if before is not None:
            k, v = torch.cat([before[0], k], dim=2), torch.cat([before[1], v], dim=2)
        # A single position after others may look at all of them; more would need a mask of their own.
        causal, past = length > 1, k.size(2) - length
        mask = None
        if causal and past:
            mask, causal = torch.ones(length, past + length, dtype=torch.bool, device=x.device).tril(past), False
        share = self.share if self.training else 0.0
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=share, is_causal=causal, enable_gqa=h != g
        )  # (B, H, T, D)
        return out.transpose(1, 2).reshape(batch, length, width), (k, v)


def _rotations(length: int, size: int) -> Tensor:
    """Cosines and sines (2, T, D) by which pairs of a head's numbers are turned at each position."""
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies  # (T, D / 2)
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()]).float()


def _rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Turn each pair (i, i + D / 2) of (B, H, T, D)."""
    first, second = x.chunk(2, dim=-1)
    return x * rotations[0] + torch.cat([-second, first], dim=-1) * rotations[1]


def _norm(kind: Literal["rms", "layer"], width: int, bias: bool) -> nn.Module:
    return nn.RMSNorm(width, eps=1e-5) if kind == "rms" else nn.LayerNorm(width, bias=bias)


def _ending(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """A linear map that ends a residual branch."""
    made = nn.Linear(inputs, outputs, bias)
    made.ends_branch = True  # type: ignore[assignment]
    return made


def _check(
    inputs: tuple[int, ...], layers: int, heads: int, kv_heads: int, width: int, position: str, dropout: float
) -> None:
    if len(inputs) != 1:
        raise ValueError(
            f"model.inputs={list(inputs)}: one number of tokens is needed; take data of tokens, such as data=text"
        )
    for name, value in (("inputs", inputs[0]), ("layers", layers), ("heads", heads), ("width", width)):
        if value < 1:
            raise ValueError(f"model.{name}={value} is not a number of anything; try 4")
    if width % heads or (position == "rotary" and width // heads % 2):
        even = "heads of an even width" if position == "rotary" else "heads"
        step = heads * (2 if position == "rotary" else 1)
        fitting = width + -width % step
        raise ValueError(f"model.width={width} does not divide into {heads} {even}; try {fitting}")
    if kv_heads < 1 or heads % kv_heads:
        fitting = max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(1, kv_heads))
        raise ValueError(f"model.kv_heads={kv_heads} does not divide {heads} heads; try {fitting}")
    if not 0 <= dropout < 1:
        raise ValueError(f"model.dropout={dropout} is not a share in [0, 1); try 0.1")
