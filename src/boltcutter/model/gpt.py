"""A decoder-only transformer over tokens."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from boltcutter.model.sharding import order_of_shares, replicate, share

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
        recompute: Keep nothing of what is inside blocks while training, and compute it again in the backward pass.

    Attributes:
        orders: By the name of a weight that is cut over ranks, the order in which they have its rows, where that is
            another than the rows' own.

    Raises:
        ValueError: Sizes do not go together.

    Source: Vaswani et al., Attention Is All You Need, 2017; Radford et al., Language Models are Unsupervised Multitask
    Learners, 2019 (norms before branches, initialisation); Press & Wolf, Using the Output Embedding to Improve Language
    Models, 2017 (tied); Zhang & Sennrich, Root Mean Square Layer Normalization, 2019; Su et al., RoFormer, 2021
    (rotary); Shazeer, GLU Variants Improve Transformer, 2020; Ainslie et al., GQA, 2023; Chen et al., Training Deep
    Nets with Sublinear Memory Cost, 2016 (recompute).
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
        recompute: bool = False,
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
        made |= {"gated": gated, "norm": norm, "recompute": recompute}
        self.blocks = nn.ModuleList(Block(width, inner, **made) for _ in range(layers))
        self.norm = _norm(norm, width, bias)
        self.head = None if tied else nn.Linear(width, outputs, bias=False)
        rotations = _rotations(self.context, width // heads) if position == "rotary" else None
        self.register_buffer("rotations", rotations, persistent=False)  # (2, T, D)
        self.orders: dict[str, Tensor] = {}
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
        x = self.embed(tokens, before)
        rotations = self.turns(x, before)
        for number, block in enumerate(self.blocks):
            x, kept = block(x, rotations, cache[number] if before and cache else None, keep=cache is not None)
            if cache is not None:
                cache[number : number + 1] = [kept]
        return self.logits(x)

    def embed(self, tokens: Tensor, before: int = 0) -> Tensor:
        """What the first block takes, (B, T, C), for tokens that follow ``before`` others."""
        end = before + tokens.size(1)
        if end > self.context:
            raise ValueError(f"model.inputs=[{self.context}], but {end} tokens came; give a longer context")
        x = self.tokens(tokens.long())  # (B, T, C)
        if self.positions is not None:
            x = x + self.positions(torch.arange(before, end, device=tokens.device))
        embedded: Tensor = self.dropout(x)
        return embedded

    def turns(self, x: Tensor, before: int = 0) -> Tensor | None:
        """Rotations of the positions of (B, T, C), if there are any."""
        return None if self.rotations is None else self.rotations[:, before : before + x.size(1)].to(x.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """What the last block gave, (B, T, C), as logits (B, T, V)."""
        x, weight = self.norm(x), cast(Any, self.tokens.weight)
        if self.head is not None:
            made: Tensor = self.head(x)
            return made
        if hasattr(weight, "full_tensor"):  # each rank has some of the tokens
            from torch.distributed.tensor import DTensor, Replicate

            cut: Any = F.linear(DTensor.from_local(x, weight.device_mesh, [Replicate()]), weight)
            return cast(Tensor, cut.full_tensor())
        return F.linear(x, weight)

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

    def shard(self, mesh: DeviceMesh, *, offload: bool = False) -> None:
        """Cut each block, and then the rest, over the ranks of ``mesh``.

        Over ``tensor_parallel`` attention is cut by heads, the MLP by its hidden units, the embedding by tokens.

        Args:
            mesh: With the dimensions ``data_parallel`` and ``tensor_parallel``.
            offload: Whether weights stay in the machine's memory while they are not used.

        Raises:
            ValueError: Heads or hidden units do not divide over the ranks, or each would drop numbers of its own.

        Source: Shoeybi et al., Megatron-LM, 2019 (heads, columns and rows); Zhao et al., PyTorch FSDP, 2023.
        """
        if mesh["tensor_parallel"].size() > 1:
            self._cut_matrices(mesh["tensor_parallel"])
        share(mesh["data_parallel"], [*self.blocks, self], offload=offload)

    def stages(self, count: int) -> list[nn.Module]:
        """Modules that are to be called one after another, with about as many blocks each.

        Raises:
            ValueError: There are fewer blocks.
        """
        layers = len(self.blocks)
        if count > layers:
            raise ValueError(
                f"trainer.devices={count}: model.layers={layers}, and a stage needs one; try trainer.devices={layers}"
            )
        ends = [layers * stage // count for stage in range(count + 1)]
        return [Stage(self, first, last) for first, last in pairwise(ends)]

    def _cut_matrices(self, mesh: DeviceMesh) -> None:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor import parallel as tp

        ranks = mesh.size()
        if self.dropout.p:
            raise ValueError("trainer.strategy.tensor_parallel_size: each rank would drop others; set model.dropout=0")
        blocks: list[Any] = list(self.blocks)
        orders = blocks[0].orders(ranks)
        for number, block in enumerate(blocks):
            for name, order in orders.items():
                for kind, parameter in getattr(block, name).named_parameters():
                    parameter.data = parameter.data[order]
                    self.orders[f"blocks.{number}.{name}.{kind}"] = order
            plan = dict.fromkeys(("qkv", "widen"), tp.ColwiseParallel())
            tp.parallelize_module(block, mesh, plan | dict.fromkeys(("attended", "narrow"), tp.RowwiseParallel()))
            replicate(block.norm_attention, mesh)
            replicate(block.norm_mlp, mesh)
            block.heads, block.kv_heads = block.heads // ranks, block.kv_heads // ranks
        whole: dict[str, tp.ParallelStyle] = {"tokens": tp.RowwiseParallel(input_layouts=Replicate())}
        if self.head is not None:
            whole["head"] = tp.ColwiseParallel(output_layouts=Replicate())
        tp.parallelize_module(self, mesh, whole)
        for module in filter(None, (self.norm, self.positions)):
            replicate(module, mesh)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            std = 0.02 / math.sqrt(2 * self.layers) if getattr(module, "ends_branch", False) else 0.02
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class Stage(nn.Module):
    """Some of a GPT's blocks, with what comes before the first or after the last of all.

    Args:
        whole: Whose blocks they are.
        first: Of them.
        last: Before which they end.
    """

    def __init__(self, whole: GPT, first: int, last: int) -> None:
        super().__init__()
        vars(self)["whole"] = whole  # not a part of it
        self.begins, self.ends = first == 0, last == len(whole.blocks)
        self.blocks = whole.blocks[first:last]
        ends = (whole.tokens, whole.positions) if self.begins else (), (whole.norm, whole.head or whole.tokens)
        self.others = nn.ModuleList(filter(None, ends[0] + (ends[1] if self.ends else ())))

    def forward(self, x: Tensor) -> Tensor:
        """Take tokens (B, T) at the beginning, else (B, T, C); give logits (B, T, V) at the end, else (B, T, C)."""
        whole: GPT = vars(self)["whole"]
        x = whole.embed(x) if self.begins else x
        rotations = whole.turns(x)
        for block in self.blocks:
            x, _ = block(x, rotations, None, keep=False)
        return whole.logits(x) if self.ends else x


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
        recompute: Keep of a forward pass what came in alone.
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
        recompute: bool,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.gated, self.share = heads, kv_heads, gated, dropout
        self.size, self.hidden, self.recompute = size, hidden, recompute = width // heads, hidden, recompute
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
        if self.recompute and not keep and torch.is_grad_enabled():
            computed: Tensor = checkpoint(self._compute, x, rotations, before, use_reentrant=False)[0]
            return computed, None
        x, kept = self._compute(x, rotations, before)
        return x, kept if keep else None

    def _compute(
        self, x: Tensor, rotations: Tensor | None, before: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        attended, kept = self.attend(self.norm_attention(x), rotations, before)
        x = x + self.dropout(self.attended(attended))
        inner = self.widen(self.norm_mlp(x))
        if self.gated:
            gate, inner = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * inner
        else:
            inner = F.gelu(inner)
        return x + self.dropout(self.narrow(inner)), kept

    def attend(
        self, x: Tensor, rotations: Tensor | None, before: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Softmax attention of each position to itself and those before it."""
        batch, length, _ = x.shape
        h, g = self.heads, self.kv_heads
        q, k, v = self.qkv(x).view(batch, length, h + 2 * g, self.size).transpose(1, 2).split([h, g, g], dim=1)
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
        return out.transpose(1, 2).reshape(batch, length, h * self.size), (k, v)

    def orders(self, ranks: int) -> dict[str, Tensor]:
        """In which order ranks have the rows of matrices that are several in one, so that each has whole heads.

        Raises:
            ValueError: Heads or hidden units do not divide.
        """
        h, g = self.heads, self.kv_heads
        for name, count in (("heads", h), ("kv_heads", g), ("hidden", self.hidden)):
            if count % ranks:
                raise ValueError(
                    f"trainer.strategy.tensor_parallel_size={ranks} does not divide model.{name}={count}; "
                    f"try model.{name}={count + -count % ranks}"
                )
        orders = {"qkv": order_of_shares([h * self.size, g * self.size, g * self.size], ranks)}
        return orders | ({"widen": order_of_shares([self.hidden] * 2, ranks)} if self.gated else {})


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
