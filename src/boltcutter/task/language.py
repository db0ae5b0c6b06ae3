"""Language modeling: prediction of the next token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from boltcutter.data.streams import Purpose, stream
from boltcutter.task.base import Pair, Task


class LanguageModeling(Task):
    """Language modeling by cross-entropy over a vocabulary of V tokens at each of T positions.

    Besides the loss, the mean over all tokens in nats, validation and test log the perplexity, and bits per byte, which
    are comparable between tokenizers, if the data module's ``statistics`` have the number of bytes of each token
    (``token_bytes``, V integers).

    Args:
        model: Maps tokens (N, T) to logits (N, T, V). A model with the attribute ``supports_cache = True`` takes a list
            as second argument, in which it caches keys and values for faster generation; ``context_length`` is its
            maximum number of tokens.
        task: Arguments of ``Task``.

    Source: Jelinek et al., Perplexity – a Measure of the Difficulty of Speech Recognition Tasks, 1977; Gao et al.,
    The Pile, 2020 (bits per byte).
    """

    kind: ClassVar[Literal["classification", "regression", "language_modeling"]] = "language_modeling"

    def __init__(self, model: nn.Module, **task: Any) -> None:
        super().__init__(model, **task)
        self.bits = nn.ModuleDict({f"{stage}_": BitsPerByte() for stage in ("val", "test")})

    @property
    def logged_metrics(self) -> set[str]:
        """Names of all metrics that this task logs."""
        return super().logged_metrics | {
            f"{stage}/{name}" for stage in ("val", "test") for name in ("perplexity", BITS_PER_BYTE)
        }

    def on_validation_start(self) -> None:
        """Set the number of bytes of each token, which a checkpoint may have changed since ``setup``."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        token_bytes = getattr(data, "statistics", {}).get("token_bytes")
        lengths = None if token_bytes is None else torch.tensor(token_bytes, device=self.device)
        metrics: Any = self.bits.values()
        for bits in metrics:
            bits.token_bytes = lengths

    on_test_start = on_validation_start

    def token_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each token in nats, shape (N, T)."""
        flat = F.cross_entropy(outputs.flatten(0, 1), targets.long().flatten(), reduction="none")
        return flat.view(targets.shape)

    def forward_summary(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each token, shape (N, T), which is all that the steps need of the model's outputs."""
        return self.token_losses(self(inputs), targets)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of each sequence in nats, shape (N,)."""
        return self.token_losses(outputs, targets).mean(dim=-1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return the probability of each next token, shape (N, T, V)."""
        return outputs.float().softmax(dim=-1)

    def test_step(self, batch: Pair, batch_idx: int) -> dict[str, Tensor]:
        """Update losses, and return the loss of each sequence."""
        return {"losses": self._evaluate("test", batch)[0]}

    @torch.inference_mode()
    def generate(
        self, prompt: Tensor, max_new_tokens: int, *, temperature: float = 1.0, top_k: int | None = None, seed: int = 0
    ) -> Iterator[int]:
        """Generate tokens that continue a prompt.

        When the context is full, its older half is dropped.

        Args:
            prompt: Tokens (T,), at least one.
            max_new_tokens: Number of tokens to generate.
            temperature: Divides the logits; 0 selects the most likely token each time.
            top_k: Sample from this number of most likely tokens; ``None`` means all.
            seed: Seed of the random generator.

        Yields:
            One token at a time.
        """
        self.eval()
        context = int(getattr(self.model, "context_length", 1 << 30))
        supports_cache = bool(getattr(self.model, "supports_cache", False))
        generator = torch.Generator().manual_seed(stream(Purpose.GENERATION, seed) >> 1)
        tokens, cache = prompt[-context:].long().to(self.device)[None], list[Any]()  # (1, T)
        new_tokens = tokens
        for _ in range(max_new_tokens):
            logits = self.model(new_tokens, cache) if supports_cache else self.model(tokens)
            token = _sample(logits[0, -1].float().cpu(), temperature, top_k, generator)
            yield int(token)
            new_tokens = token.view(1, 1).to(self.device)
            tokens = torch.cat([tokens, new_tokens], dim=1)
            if tokens.size(1) > context:
                tokens = tokens[:, -max(1, context // 2) :]
                new_tokens, cache = tokens, []

    def _training_loss(self, batch: Pair) -> Tensor:
        return self._evaluate("train", batch)[0].mean()

    def _evaluate(self, stage: str, batch: Pair) -> Pair:
        inputs, targets = batch
        token_losses = self.forward_summary(inputs, targets)
        losses = token_losses.mean(dim=-1)
        self.means[f"{stage}_"].update(losses.detach())  # type: ignore[operator]
        if stage != "train":
            self.bits[f"{stage}_"].update(token_losses, targets)  # type: ignore[operator]
        return losses, token_losses

    def _log_epoch(self, stage: str, loss: str, *, reset: bool = True) -> None:
        if stage != "train":
            self.log(f"{stage}/perplexity", self.means[f"{stage}_"].compute().exp())  # type: ignore[operator]
            bits: Any = self.bits[f"{stage}_"]
            if bits.token_bytes is not None:
                self.log(f"{stage}/{BITS_PER_BYTE}", bits.compute())
            bits.reset()
        super()._log_epoch(stage, loss, reset=reset)


class BitsPerByte(Metric):
    """Cross-entropy per byte of text, in bits.

    Tokens without text, such as the end of a document, are ignored.

    Attributes:
        token_bytes: Number of bytes of each token, shape (V,); updates are ignored while it is None.
    """

    full_state_update = False
    nats: Tensor
    bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.token_bytes: Tensor | None = None
        self.add_state("nats", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("bytes", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, losses: Tensor, targets: Tensor) -> None:
        """Add the losses in nats (N, T) of the tokens ``targets`` (N, T)."""
        if self.token_bytes is not None:
            lengths = self.token_bytes[targets.long()]
            self.nats += (losses * (lengths > 0)).sum()
            self.bytes += lengths.sum()

    def compute(self) -> Tensor:
        """Return bits per byte."""
        return self.nats / math.log(2) / self.bytes


BITS_PER_BYTE = "bits_per_byte"


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """Sample a token (1,) from logits (V,)."""
    if temperature < 1e-4:  # a division by less could overflow
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, len(logits))).values[-1], -math.inf)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
