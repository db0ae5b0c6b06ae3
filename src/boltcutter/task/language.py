"""The next token, at each place of a text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from boltcutter.task.base import Pair, Task


class Language(Task):
    """Cross-entropy over V tokens at each of T places.

    Besides the loss, which is the mean over all tokens in nats, validation and test log its exponential, the
    perplexity; and bits per byte of text, which tokenizers do not change, where the data module's ``statistics`` tell
    how many bytes each token stands for (``token_bytes``, V whole numbers).

    Args:
        model: Gives logits (N, T, V) for tokens (N, T). To sample faster it may take a list as second argument in
            which it keeps what it needs of the tokens so far, and say so by ``caches = True``.
        task: ``optimizer``, ``scheduler``, ``interval``, ``monitor``, ``metrics``, ``l1``, ``l2``, ``compile`` and
            ``channels_last``, as for ``Task``.

    Source: Jelinek et al., Perplexity – a Measure of the Difficulty of Speech Recognition Tasks, 1977; Gao et al.,
    The Pile, 2020 (bits per byte).
    """

    kind: ClassVar[Literal["classification", "regression", "language_modeling"]] = "language_modeling"

    def __init__(self, model: nn.Module, **task: Any) -> None:
        super().__init__(model, **task)
        self.bits = nn.ModuleDict({f"{stage}_": BitsPerByte() for stage in ("val", "test")})

    @property
    def logged(self) -> set[str]:
        """The names of everything that this task logs."""
        return super().logged | {f"{stage}/{name}" for stage in ("val", "test") for name in ("perplexity", BITS)}

    def on_validation_start(self) -> None:
        """Learn how long tokens are."""
        self._measure("val")

    def on_test_start(self) -> None:
        """Learn how long tokens are."""
        self._measure("test")

    def token_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of each token in nats, shape (N, T)."""
        flat = F.cross_entropy(outputs.flatten(0, 1), targets.long().flatten(), reduction="none")
        return flat.view(targets.shape)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of each window in nats, shape (N,)."""
        return self.token_losses(outputs, targets).mean(dim=-1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Probability of each token to come next, shape (N, T, V)."""
        return outputs.float().softmax(dim=-1)

    def test_step(self, batch: Pair, batch_idx: int) -> dict[str, Tensor]:
        """Gather losses; give out that of each window."""
        losses, _ = self._observe("test", batch)
        return {"losses": losses}

    @torch.inference_mode()
    def generate(
        self, prompt: Tensor, count: int, *, temperature: float = 1.0, top_k: int | None = None, seed: int = 0
    ) -> Iterator[int]:
        """Go on with a text.

        Where the context is full, its newer half is kept.

        Args:
            prompt: Tokens (T,), at least one.
            count: How many to give.
            temperature: Divides the logits; 0 takes the likeliest token each time.
            top_k: How many of the likeliest tokens are drawn from; none means all.
            seed: All that the draws depend on.

        Yields:
            One token after another.
        """
        self.eval()
        context, caches = int(getattr(self.model, "context", 1 << 30)), getattr(self.model, "caches", False)
        random = torch.Generator().manual_seed(seed)
        tokens, cache = prompt[-context:].long().to(self.device)[None], list[Any]()  # (1, T)
        fresh = tokens
        for _ in range(count):
            logits = self.model(fresh, cache) if caches else self.model(tokens)
            token = _draw(logits[0, -1].float().cpu(), temperature, top_k, random)
            yield int(token)
            fresh = token.view(1, 1).to(self.device)
            tokens = torch.cat([tokens, fresh], dim=1)
            if tokens.size(1) > context:
                tokens = tokens[:, -max(1, context // 2) :]
                fresh, cache = tokens, []

    def _observe_training(self, batch: Pair) -> Tensor:
        return self._observe("train", batch)[0].mean()

    def _observe(self, stage: str, batch: Pair) -> Pair:
        inputs, targets = batch
        outputs = self(inputs)
        tokens = self.token_losses(outputs, targets)
        losses = tokens.mean(dim=-1)
        self.means[f"{stage}_"].update(losses.detach())  # type: ignore[operator]
        if stage != "train":
            self.bits[f"{stage}_"].update(tokens, targets)  # type: ignore[operator]
        return losses, outputs

    def _report(self, stage: str, loss: str, *, reset: bool = True) -> None:
        if stage != "train":
            self.log(f"{stage}/perplexity", self.means[f"{stage}_"].compute().exp())  # type: ignore[operator]
            bits: Any = self.bits[f"{stage}_"]
            if bits.known:
                self.log(f"{stage}/{BITS}", bits.compute())
            bits.reset()
        super()._report(stage, loss, reset=reset)

    def _measure(self, stage: str) -> None:
        statistics = getattr(getattr(self.trainer, "datamodule", None), "statistics", {})
        bits: Any = self.bits[f"{stage}_"]
        bits.learn(statistics.get("token_bytes"), self.device)


class BitsPerByte(Metric):
    """Bits that it takes to tell each byte of a text.

    Tokens that stand for no text, as the end of a document, count neither as bits nor as bytes.
    """

    full_state_update = False
    nats: Tensor
    bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lengths: Tensor | None = None
        self.add_state("nats", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("bytes", torch.tensor(0), dist_reduce_fx="sum")

    @property
    def known(self) -> bool:
        """Whether it has been told how long tokens are."""
        return self.lengths is not None

    def learn(self, lengths: list[int] | None, device: torch.device) -> None:
        """Take the bytes of each token, or none if they are not known."""
        self.lengths = None if lengths is None else torch.tensor(lengths, device=device)

    def update(self, losses: Tensor, targets: Tensor) -> None:
        """Add losses in nats (N, T) of the tokens ``targets`` (N, T)."""
        if self.lengths is not None:
            lengths = self.lengths[targets.long()]
            self.nats += (losses * (lengths > 0)).sum()
            self.bytes += lengths.sum()

    def compute(self) -> Tensor:
        """Bits per byte."""
        return self.nats / math.log(2) / self.bytes


BITS = "bits_per_byte"


def _draw(logits: Tensor, temperature: float, top_k: int | None, random: torch.Generator) -> Tensor:
    """One token (1,) by logits (V,)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, len(logits))).values[-1], -math.inf)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=random)
