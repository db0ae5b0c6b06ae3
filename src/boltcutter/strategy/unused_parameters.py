"""Parameters that a loss does not use, as in GANs and idle heads, under DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from boltcutter.strategy.buckets import FixedBucketsDDP


class UnusedParameters:
    """Detects unused parameters in the first step, and then sets ``find_unused_parameters`` for the rest of training.

    DDP waits for the gradient of each parameter. If the graph of the first loss lacks one on any rank, DDP's reducer is
    replaced, before the backward pass, by one that knows which ones there are. A later step that leaves out parameters
    for the first time is an error, which DDP raises before the weights change.
    """

    def __init__(
        self, model: FixedBucketsDDP, reduce_any: Callable[[bool], bool], register_hooks: Callable[[], None]
    ) -> None:
        self.model, self.reduce_any, self.register_hooks = model, reduce_any, register_hooks
        self.is_first = True  # step that averages gradients, in which manual optimization may have several losses
        self.has_averaged = False
        self._find_parameters()
        model.register_forward_pre_hook(lambda *_: self.before_forward())

    def _find_parameters(self) -> None:
        """List the parameters outside of a step, as a module with several optimizers may freeze some in a step."""
        self.parameters, self.is_sparse = self.model._build_params_for_reducer()
        names = self.model._build_debug_param_to_name_mapping(self.parameters)  # type: ignore[no-untyped-call]
        self.names = [names[index] for index in range(len(self.parameters))]
        self.frozen = [p for p in self.model.parameters() if not p.requires_grad]

    def before_forward(self) -> None:
        """Average also gradients of parameters that were unfrozen since the last step, which DDP does not notice."""
        self.is_first = not self.has_averaged
        if any(p.requires_grad for p in self.frozen):
            self._find_parameters()
            self._replace_reducer()
            self.model.reducer._push_all_rebuilt_params()

    @property
    def is_averaging(self) -> bool:
        """Whether gradients of this backward pass are averaged, and DDP does not look for unused parameters itself."""
        model = self.model
        return model.require_backward_grad_sync and not (model.find_unused_parameters or model.static_graph)

    def before_backward(self, loss: Tensor) -> None:
        """In the first step, look for unused parameters if any rank might leave out some."""
        if not (self.is_first and self.is_averaging):
            return
        self.has_averaged = True
        used = reachable(loss)
        if self.reduce_any(used is not None and not used >= set(self.parameters)):
            self.model.find_unused_parameters = True
            self._replace_reducer()
            self.model.reducer.prepare_for_backward([loss])
            self._report(used or set())

    def after_backward(self) -> None:
        """Raise DDP's error if this step has left out parameters, before the weights change."""
        if self.is_averaging:
            self.model._check_reducer_finalized()  # type: ignore[no-untyped-call]

    def _replace_reducer(self) -> None:
        frozen = [p.requires_grad_() for p in self.parameters if not p.requires_grad]  # as torch requires it
        # With find_unused_parameters torch keeps the order of the first buckets, which is in reverse.
        step = -1 if self.model.find_unused_parameters and self.model.is_reversed else 1
        names = dict(enumerate(self.names[::step]))
        lists = self.parameters[::step], self.is_sparse[::step]
        self.model._ddp_init_helper(*lists, names, self.model.static_graph)  # type: ignore[no-untyped-call]
        for p in frozen:
            p.requires_grad_(False)
        self.register_hooks()

    @rank_zero_only
    def _report(self, used: set[Tensor]) -> None:
        unused = [name for name, p in zip(self.names, self.parameters, strict=True) if p not in used]
        listed = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        print(
            f"note: a loss of {type(self.model.module).__name__} does not use all parameters "
            f"({listed or 'on another rank'}); DDP continues with find_unused_parameters=true, which searches the "
            "autograd graph at each step; for parameters that are never used, requires_grad=False avoids this"
        )


def reachable(loss: Tensor) -> set[Tensor] | None:
    """The leaf tensors in the autograd graph of ``loss``; None if reentrant activation checkpointing hides some."""
    leaves, seen, waiting = set[Tensor](), set[Any](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return None
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            leaves.add(leaf)
        waiting.extend(following for following, _ in node.next_functions)
    return leaves
