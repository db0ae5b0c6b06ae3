"""What the user's own step passes to functions of torch, while it runs."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

DROPOUT = frozenset(
    ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "dropout_")
)
ATTENTION = "scaled_dot_product_attention"  # whose dropout_p no mode of a layer turns off


class ActiveDropout:
    """Calls a step, and finds functional dropout that is active in it.

    A dropout module is left out: that it is in training mode was somebody's decision. So is a place that is passed
    several times, as by Monte Carlo dropout.

    Args:
        places: Where they are appended, as ``Class.method:line``.
        layers: Of the module; others were created by the step itself.
    """

    def __init__(self, places: list[str], layers: Iterable[nn.Module] = ()) -> None:
        self.places, self.layers = places, {id(layer) for layer in layers}

    def __call__(self, step: Callable[..., Any], args: Any, options: Any) -> Any:
        """Call the step."""
        mode = _DropoutMode(self.layers)
        with mode:
            output = step(*args, **options)
        self.places += sorted({place for (place, _), count in mode.places.items() if count == 1})
        return output


class _DropoutMode(TorchFunctionMode):
    def __init__(self, layers: set[int]) -> None:
        super().__init__()
        self.layers = layers
        self.places: Counter[tuple[str, int]] = Counter()  # by the object that calls it
        self.last: dict[
            tuple[str, int], tuple[Any, Any]
        ] = {}  # of each place, the frame and the input of its last call

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at calls of dropout."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in DROPOUT or name == ATTENTION:
            if name == ATTENTION:
                active, share = True, kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            else:
                active = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
                share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            frame, by_layer = inspect.currentframe(), False
            assert frame is not None
            frame = frame.f_back or frame
            while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
                layer = frame.f_locals.get("self")
                by_layer |= isinstance(layer, nn.Module) and (id(layer) in self.layers or not self.layers)
                frame = frame.f_back
            owner = frame.f_locals.get("self")
            if active and share and not by_layer:
                place = f"{type(owner).__name__}.{frame.f_code.co_name}:{frame.f_lineno}"
                key = place, id(owner)
                given = args[0] if args else kwargs.get("input", kwargs.get("query"))
                last_frame, last_given = self.last.get(key, (None, None))
                self.places[key] += (
                    last_frame is not frame or last_given is given
                )  # a loop over layers is no second pass
                self.last[key] = frame, given
        return function(*args, **kwargs)
