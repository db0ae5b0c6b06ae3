"""Parameters that a loss does not use, as in GANs and idle heads, under DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from boltcutter.strategy.buckets import FixedBucketsDDP


class UnusedParameters:
    """Detects unused parameters, and then sets ``find_unused_parameters`` for the rest of training.

    DDP waits for the gradient of each parameter. If the graph of the first loss lacks one on any rank, the gradients
    of this step are computed before they are averaged, by a new reducer that knows which ones there are. If only a
    later step leaves out parameters, its gradients have not been averaged. With ``SharedMemory`` they are still those
    of this rank, and are averaged then if all ranks have left out the same ones; otherwise, DDP's error is raised
    before the weights change. A step that uses all parameters is not changed, apart from one inexpensive check.

    Attributes:
        can_recover: Whether a later step may leave out parameters.
    """

    def __init__(
        self, model: FixedBucketsDDP, reduce_any: Callable[[bool], bool], register_hooks: Callable[[], None]
    ) -> None:
        self.model, self.reduce_any, self.register_hooks = model, reduce_any, register_hooks
        self._find_parameters()
        self.is_first, self.can_recover = True, False
        self.used: set[nn.Parameter] | None = None  # those with a gradient, while it is averaged later
        self.handles: list[Any] = []
        model.register_forward_pre_hook(lambda *_: self.before_forward())

    def _find_parameters(self) -> None:
        """List the parameters outside of a step, as a module with several optimizers may freeze some in a step."""
        self.parameters, self.is_sparse = self.model._build_params_for_reducer()
        names = self.model._build_debug_param_to_name_mapping(self.parameters)  # type: ignore[no-untyped-call]
        self.names = [names[index] for index in range(len(self.parameters))]
        self.frozen = [p for p in self.model.parameters() if not p.requires_grad]

    def before_forward(self) -> None:
        """Average also gradients of parameters that were unfrozen since the last step, which DDP does not notice."""
        if any(p.requires_grad for p in self.frozen):
            self._find_parameters()
            self._rebuild(find_unused=self.model.find_unused_parameters)

    @property
    def is_averaging(self) -> bool:
        """Whether gradients of this backward pass are averaged, and DDP does not look for unused parameters itself."""
        model = self.model
        return model.require_backward_grad_sync and not (model.find_unused_parameters or model.static_graph)

    def before_backward(self, loss: Tensor) -> None:
        """In the first step, average gradients later if any rank might leave out parameters."""
        if not (self.is_first and self.is_averaging):
            return
        self.is_first = False
        # A graph may also lack parameters that it uses, such as those of reentrant activation checkpointing.
        if self.reduce_any(not reachable(loss) >= set(self.parameters)) and self._can_repeat():
            self._rebuild(find_unused=True)  # it ignores the next backward pass, which it does not expect
            used = self.used = set[nn.Parameter]()
            self.handles = [
                p.register_post_accumulate_grad_hook(used.add)  # type: ignore[no-untyped-call]
                for p in self.parameters
                if p.requires_grad
            ]

    def after_backward(self) -> None:
        """Average gradients that DDP has not averaged."""
        if self.used is None:
            if not self.is_averaging:
                return
            try:
                self.model._check_reducer_finalized()  # type: ignore[no-untyped-call]
                return
            except RuntimeError:
                if not (self.can_recover and self._can_repeat()):
                    raise
            self._rebuild(find_unused=True)
            used = {p for p in self.parameters if p.requires_grad and p.grad is not None}
        else:
            used, self.used = self.used, None
            for handle in self.handles:
                handle.remove()
            if not self.reduce_any(len(used) < len(self.parameters)):
                self._rebuild(find_unused=False)
        if self.model.find_unused_parameters:
            self._report(used)
        self._average(used)

    def _can_repeat(self) -> bool:
        """Whether gradients can be passed to the hooks of their parameters a second time."""
        own_hooks = (p._backward_hooks or p._post_accumulate_grad_hooks for p in self.parameters)
        return not any(self.is_sparse) and not any(own_hooks)

    def _rebuild(self, *, find_unused: bool) -> None:
        model = self.model
        model.find_unused_parameters = find_unused
        frozen = [p.requires_grad_() for p in self.parameters if not p.requires_grad]  # as torch requires it
        order = -1 if find_unused and model.is_reversed else 1  # as if the model had been wrapped with this setting
        names = dict(enumerate(self.names[::order]))
        model._ddp_init_helper(self.parameters[::order], self.is_sparse[::order], names, model.static_graph)  # type: ignore[no-untyped-call]
        model.reducer._push_all_rebuilt_params()
        model.reducer._rebuild_buckets()  # which a forward pass would do
        for p in frozen:
            p.requires_grad_(False)
        self.register_hooks()

    def _average(self, used: set[nn.Parameter]) -> None:
        """Average gradients as in a backward pass of DDP that yields them."""
        ordered = [p for p in self.parameters if p in used]
        gradients = [p.grad for p in ordered]
        views = [p.view_as(p) for p in ordered]
        for p in ordered:
            p.grad = None
        self.model.reducer.prepare_for_backward(views if self.model.find_unused_parameters else [])
        torch.autograd.backward(views, gradients)

    @rank_zero_only
    def _report(self, used: set[nn.Parameter]) -> None:
        unused = [name for name, p in zip(self.names, self.parameters, strict=True) if p not in used]
        listed = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        print(
            f"note: a loss of {type(self.model.module).__name__} does not use all parameters "
            f"({listed or 'on another rank'}); DDP continues with find_unused_parameters=true, which searches the "
            "autograd graph at each step; for parameters that are never used, requires_grad=False avoids this"
        )


def reachable(loss: Tensor) -> set[Tensor]:
    """The leaf tensors in the autograd graph of ``loss``."""
    found: set[Tensor] = set()
    seen, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            found.add(leaf)
        waiting.extend(following for following, _ in node.next_functions)
    return found
