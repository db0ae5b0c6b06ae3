"""Do something after the next call of a hook of a module, where Lightning offers no hook of callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L


class AfterHook:
    """Calls a function once, after the next call of a hook of a module.

    It takes the place of the hook for this one call, so the hook may be set or replaced during training.

    Args:
        module: The module.
        name: Name of its hook.
        function: Called without arguments.
    """

    def __init__(self, module: L.LightningModule, name: str, function: Callable[[], None]) -> None:
        self.module, self.name, self.function = module, name, function
        self.replaced = vars(module).get(name)  # a hook that was set on the instance
        vars(module)[name] = self

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Restore the hook, call it, then the function."""
        state = vars(self.module)
        if state.get(self.name) is self:
            del state[self.name]
            if self.replaced is not None:
                state[self.name] = self.replaced
        hook = self.replaced or getattr(type(self.module), self.name).__get__(self.module)
        output = hook(*args, **options)
        self.function()
        return output
