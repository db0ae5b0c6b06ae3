"""A decoder-only transformer language model."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from boltcutter.model.transformer import Block, KeyValue, make_norm, replicate, rope_table

Cache = list[KeyValue]  # of each layer


class GPT(nn.Module):
    """A decoder-only transformer with causal self-attention.

    Shapes: B batch, T sequence length, C hidden size, H query heads, G key-value heads, D head size, V vocabulary size.
    Weights are initialized from a normal distribution with standard deviation 0.02, and those of the last layer of each
    residual branch with 0.02 / sqrt(2 * num_layers).

    Args:
        input_shape: Shape of one sample: (T,), where T is the maximum context length.
        vocab_size: V.
        num_layers: Number of transformer blocks.
        num_heads: H.
        num_kv_heads: G, a divisor of H; ``None`` means H.
        hidden_size: C, a multiple of H.
        intermediate_size: Size of the MLP's hidden layer; ``None`` means 4 C for GELU, and 8/3 C rounded up to a
            multiple of 64 for SwiGLU.
        norm: Normalization before each residual branch and before the output layer.
        position: Rotary position embedding (RoPE) of queries and keys, or a learned embedding of each position.
        mlp: Gated MLP with SiLU (SwiGLU), or two layers with GELU.
        bias: Whether linear layers and LayerNorms have biases.
        tie_embeddings: Whether the output layer shares its weight with the token embedding.
        dropout: Dropout probability of embeddings, attention weights and residual branches.
        activation_checkpointing: Recompute the activations inside blocks in the backward pass instead of storing them.

    Attributes:
        row_permutations: By parameter name, the order of rows in which a tensor-parallel parameter is stored over the
            ranks, for parameters that are not stored in their original order.

    Raises:
        ValueError: A size is not positive, or sizes are incompatible with each other.

    Source: Vaswani et al., Attention Is All You Need, 2017; Radford et al., Language Models are Unsupervised Multitask
    Learners, 2019 (pre-normalization, initialization); Press & Wolf, Using the Output Embedding to Improve Language
    Models, 2017 (tied embeddings); Zhang & Sennrich, Root Mean Square Layer Normalization, 2019; Su et al., RoFormer,
    2021 (RoPE); Shazeer, GLU Variants Improve Transformer, 2020; Ainslie et al., GQA, 2023; Chen et al., Training Deep
    Nets with Sublinear Memory Cost, 2016 (activation checkpointing).
    """

    supports_cache = True  # ``forward`` accepts a key-value cache
    rope: Tensor | None

    def __init__(
        self,
        input_shape: tuple[int, ...],
        vocab_size: int,
        *,
        num_layers: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        hidden_size: int = 128,
        intermediate_size: int | None = None,
        norm: Literal["rmsnorm", "layernorm"] = "rmsnorm",
        position: Literal["rope", "learned"] = "rope",
        mlp: Literal["swiglu", "gelu"] = "swiglu",
        bias: bool = False,
        tie_embeddings: bool = True,
        dropout: float = 0.0,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1:
            raise ValueError(
                f"model.input_shape={list(input_shape)} is not a sequence length; use token data, such as data=text"
            )
        _check_sizes(input_shape=input_shape[0], num_layers=num_layers, num_heads=num_heads, hidden_size=hidden_size)
        _check_heads(num_heads, num_kv_heads or num_heads, hidden_size, position)
        if not 0 <= dropout < 1:
            raise ValueError(f"model.dropout={dropout} is not in [0, 1); try 0.1")
        gated = mlp == "swiglu"
        if not intermediate_size:
            intermediate_size = 64 * math.ceil(8 * hidden_size / 3 / 64) if gated else 4 * hidden_size
        self.context_length, self.num_layers = input_shape[0], num_layers
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.position_embedding = nn.Embedding(self.context_length, hidden_size) if position == "learned" else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                hidden_size,
                intermediate_size,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads or num_heads,
                gated=gated,
                norm=norm,
                bias=bias,
                dropout=dropout,
                activation_checkpointing=activation_checkpointing,
            )
            for _ in range(num_layers)
        )
        self.norm = make_norm(norm, hidden_size, bias)
        self.head = None if tie_embeddings else nn.Linear(hidden_size, vocab_size, bias=False)
        rope = rope_table(self.context_length, hidden_size // num_heads) if position == "rope" else None
        self.register_buffer("rope", rope, persistent=False)  # (2, T, D)
        self.row_permutations: dict[str, Tensor] = {}
        self.apply(self._init_weights)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the logits of the next token at each position.

        Args:
            tokens: Token ids (B, T) that follow the cached ones.
            cache: Keys and values of the previous positions, one pair for each layer; extended in place by those of
                ``tokens``. Pass an empty list at first.

        Returns:
            Logits of shape (B, T, V).

        Raises:
            ValueError: The sequence is longer than the maximum context length.
        """
        offset = cache[0][0].size(2) if cache else 0
        x = self.embed(tokens, offset)
        rope = self.rope_at(x, offset)
        for number, block in enumerate(self.blocks):
            x, key_value = block(x, rope, cache[number] if offset and cache else None, use_cache=cache is not None)
            if cache is not None:
                cache[number : number + 1] = [key_value]
        return self.logits(x)

    def embed(self, tokens: Tensor, offset: int = 0) -> Tensor:
        """Return the input (B, T, C) of the first block, for tokens that start at position ``offset``."""
        end = offset + tokens.size(1)
        if not torch.compiler.is_exporting() and end > self.context_length:
            raise ValueError(
                f"model.input_shape=[{self.context_length}] is shorter than the sequence of {end} tokens; "
                "increase data.shape"
            )
        x = self.token_embedding(tokens.long())  # (B, T, C)
        if self.position_embedding is not None:
            x = x + self.position_embedding(torch.arange(offset, end, device=tokens.device))
        embedded: Tensor = self.dropout(x)
        return embedded

    def rope_at(self, x: Tensor, offset: int = 0) -> Tensor | None:
        """Return the RoPE table (2, T, D) for the positions of ``x`` (B, T, C), or ``None`` without RoPE."""
        if self.rope is None:
            return None
        # Not a slice, whose strides and bounds would depend on T and the offset; `torch.export` needs the same for any.
        positions = torch.arange(offset, offset + x.size(1), device=x.device)
        return self.rope.index_select(1, positions).to(x.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Map the output of the last block, (B, T, C), to logits (B, T, V)."""
        x, weight = self.norm(x), cast(Any, self.token_embedding.weight)
        if self.head is not None:
            logits: Tensor = self.head(x)
            return logits
        if hasattr(weight, "full_tensor"):  # a DTensor that is sharded over the vocabulary
            from torch.distributed.tensor import DTensor, Replicate

            sharded: Any = F.linear(DTensor.from_local(x, weight.device_mesh, [Replicate()]), weight)
            return cast(Tensor, sharded.full_tensor())
        return F.linear(x, weight)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return one parameter group with weight decay, and one without for embeddings, norms and biases.

        Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization, 2019; OLMo team, 2 OLMo 2 Furious, 2025
        (no decay of embeddings).
        """
        embeddings = {id(m.weight) for m in self.modules() if isinstance(m, nn.Embedding)}
        matrices = {id(m.weight) for m in self.modules() if isinstance(m, nn.Linear)}  # 1-D where FSDP1 shards them
        trainable = [p for p in self.parameters() if p.requires_grad]
        decay = [id(p) in matrices - embeddings for p in trainable]
        groups: list[dict[str, Any]] = [
            {"params": [p for p, decays in zip(trainable, decay, strict=True) if decays]},
            {"params": [p for p, decays in zip(trainable, decay, strict=True) if not decays], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard attention by head, the MLP by hidden unit and the embedding by token, over ``tensor_parallel``.

        Args:
            mesh: Device mesh with the dimension ``tensor_parallel``.

        Raises:
            ValueError: The number of ranks does not divide the heads or hidden units, or the model has dropout, whose
                masks would differ between ranks.

        Source: Shoeybi et al., Megatron-LM, 2019.
        """
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor import parallel as tp

        mesh = mesh["tensor_parallel"]
        ranks = mesh.size()
        if ranks == 1:
            return
        self.check_shards(ranks)
        blocks: list[Any] = list(self.blocks)
        permutations = blocks[0].make_row_permutations(ranks)
        for number, block in enumerate(blocks):
            for name, permutation in permutations.items():
                for kind, parameter in getattr(block, name).named_parameters():
                    parameter.data = parameter.data[permutation]
                    self.row_permutations[f"blocks.{number}.{name}.{kind}"] = permutation
            plan = dict.fromkeys(("qkv_proj", "up_proj"), tp.ColwiseParallel())
            tp.parallelize_module(block, mesh, plan | dict.fromkeys(("out_proj", "down_proj"), tp.RowwiseParallel()))
            replicate(block.attention_norm, mesh)
            replicate(block.mlp_norm, mesh)
            block.num_heads, block.num_kv_heads = block.num_heads // ranks, block.num_kv_heads // ranks
        outer: dict[str, tp.ParallelStyle] = {"token_embedding": tp.RowwiseParallel(input_layouts=Replicate())}
        if self.head is not None:
            outer["head"] = tp.ColwiseParallel(output_layouts=Replicate())
        tp.parallelize_module(self, mesh, outer)
        for module in filter(None, (self.norm, self.position_embedding)):
            replicate(module, mesh)

    def check_shards(self, ranks: int) -> None:
        """Check that the matrices can be sharded over so many ranks.

        Raises:
            ValueError: The number of ranks does not divide the heads or hidden units, or the model has dropout.
        """
        if self.dropout.p:
            raise ValueError(
                f"trainer.strategy.tensor_parallel_size={ranks} does not support model.dropout={self.dropout.p}, "
                "whose masks would differ between ranks; set model.dropout=0"
            )
        block: Any = self.blocks[0]
        block.make_row_permutations(ranks)

    def stages(self, count: int) -> list[nn.Module]:
        """Split the model into ``count`` pipeline stages with about the same number of blocks.

        Raises:
            ValueError: There are fewer blocks than stages.
        """
        layers = len(self.blocks)
        if count > layers:
            raise ValueError(
                f"trainer.devices={count} exceeds model.num_layers={layers}, and each pipeline stage needs one; "
                f"try trainer.devices={layers}"
            )
        ends = [layers * stage // count for stage in range(count + 1)]
        return [Stage(self, first, last) for first, last in pairwise(ends)]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            std = 0.02 / math.sqrt(2 * self.num_layers) if getattr(module, "ends_branch", False) else 0.02
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class Stage(nn.Module):
    """A pipeline stage: consecutive blocks, with the embedding in the first stage and the output layer in the last."""

    def __init__(self, model: GPT, first: int, last: int) -> None:
        super().__init__()
        vars(self)["model"] = model  # not registered as a submodule, whose parameters would belong to every stage
        self.is_first, self.is_last = first == 0, last == len(model.blocks)
        self.blocks = model.blocks[first:last]
        embeddings = (model.token_embedding, model.position_embedding) if self.is_first else ()
        output = (model.norm, model.head or model.token_embedding) if self.is_last else ()
        self.others = nn.ModuleList(filter(None, embeddings + output))

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, T) or hidden states (B, T, C) to hidden states, or to logits (B, T, V) in the last stage."""
        model: GPT = vars(self)["model"]
        if self.is_first:
            x = model.embed(x)
        rope = model.rope_at(x)
        for block in self.blocks:
            x, _ = block(x, rope, None, use_cache=False)
        return model.logits(x) if self.is_last else x


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"model.{name}={value} is not positive; try 4")


def _check_heads(num_heads: int, num_kv_heads: int, hidden_size: int, position: str) -> None:
    multiple = num_heads * (2 if position == "rope" else 1)  # RoPE rotates pairs of dimensions
    if hidden_size % multiple:
        even = " of even size" if position == "rope" else ""
        raise ValueError(
            f"model.hidden_size={hidden_size} does not divide into model.num_heads={num_heads} heads{even}; "
            f"try {hidden_size + -hidden_size % multiple}"
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        fitting = max(n for n in range(1, num_heads + 1) if num_heads % n == 0 and n <= max(1, num_kv_heads))
        raise ValueError(
            f"model.num_kv_heads={num_kv_heads} does not divide model.num_heads={num_heads}; try {fitting}"
        )
