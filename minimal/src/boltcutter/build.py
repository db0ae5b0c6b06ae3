"""Make objects from configuration, and find its mistakes before anything is made.

A mapping with a ``_target_`` stands for a call of that class or function with its other keys as arguments;
``_partial_: true`` leaves the call to be finished later, as that of an optimizer.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, get_type_hints
from unittest.mock import Mock

from omegaconf import OmegaConf
from pydantic import ConfigDict, TypeAdapter

from boltcutter.config import ConfigError, DictConfig, hint, one_line, plain, say

SPECIAL = ("_target_", "_partial_")
# What a class hands its **kwargs on to: else a misspelt keyword would pass every look at the signature.
HANDS_ON = {"DDPStrategy": "torch.nn.parallel.DistributedDataParallel", "WandbLogger": "wandb.init"}


def build(node: Any, path: str, **extra: Any) -> Any:
    """Make what stands at ``path``, with arguments that are known only now."""
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True)
    if isinstance(node, list):
        return [build(value, f"{path}.{index}") for index, value in enumerate(node)]
    if not isinstance(node, dict):
        return node
    values = {key: build(value, f"{path}.{key}") for key, value in node.items() if key not in SPECIAL} | extra
    if "_target_" not in node:
        return values
    call = partial(locate(node["_target_"]), **values)
    if node.get("_partial_"):
        return call
    try:
        return call()
    except Exception as error:
        # Any other of Python's own exceptions is a fault in code, and wants its traceback.
        told = isinstance(error, ValueError | TypeError | ImportError | OSError)
        if type(error).__module__ == "builtins" and not told:
            raise
        text = one_line(error)
        raise ConfigError(text if text.startswith(f"{path.partition('.')[0]}.") else f"{path}: {text}") from error


def check(cfg: DictConfig, root: Callable[..., Any]) -> list[str]:
    """One line for each mistake in ``cfg``, whose top-level keys are the arguments of ``root``."""
    return list(_check_call(root, plain(cfg, resolve=True), plain(cfg), ""))


@cache
def locate(path: str) -> Callable[..., Any]:
    """The class or function that a dotted path names."""
    module, _, name = str(path).rpartition(".")
    try:
        found = importlib.import_module(module)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{path} cannot be imported ({one_line(error)}); give the full path of a class") from None
    if not callable(getattr(found, name, None)):
        raise ConfigError(f"{module} has no {name}{hint(name, dir(found)) or '; give the full path of a class'}")
    return getattr(found, name)  # type: ignore[no-any-return]


@cache
def arguments(target: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """What a call takes by name, with annotations read as types; and whether it takes any other name as well."""
    every = inspect.signature(target).parameters
    try:
        types = get_type_hints(inspect.unwrap(target.__init__ if inspect.isclass(target) else target))
    except Exception:  # whatever a foreign module's annotations raise when read
        types = {}
    more = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    known = {n: p.replace(annotation=types.get(n, Any)) for n, p in every.items() if p.kind not in more}
    takes_any = any(p.kind is more[1] for p in every.values())
    if takes_any and target.__name__ in HANDS_ON:
        handed, takes_any = arguments(locate(HANDS_ON[target.__name__]))
        known = {n: p.replace(default=None) for n, p in handed.items() if n != "module"} | known
    return known, takes_any


def _check_call(target: Callable[..., Any], node: Any, raw: Any, path: str) -> Iterator[str]:
    known, takes_any = arguments(target)
    for key, value in node.items():
        where = f"{path}.{key}".lstrip(".")
        if key in SPECIAL:
            continue
        if key not in known and not takes_any:
            yield f"{where}: {target.__name__} takes no such argument{hint(key, known)}"
        elif isinstance(raw[key], str) and raw[key].startswith("${"):
            continue  # told where it is written
        elif mistakes := list(_check(value, raw[key], where)):
            yield from mistakes
        elif key in known and not _fits(value, known[key].annotation):
            wanted = inspect.formatannotation(known[key].annotation)
            near = hint(str(value), re.findall(r"'([\w-]+)'", wanted))
            yield f"{where}={say(value)}: expected {wanted}{near}"
    for name, parameter in known.items():
        if name not in node and parameter.default is parameter.empty and not node.get("_partial_"):
            yield f"{path}.{name}: missing; {target.__name__} needs it".lstrip(".")


def _check(value: Any, raw: Any, path: str) -> Iterator[str]:
    """Mistakes at ``path`` and below."""
    if value == "???":
        yield f"{path}: not set; say {path}=…"
    if isinstance(value, list):
        value, raw = dict(enumerate(value)), dict(enumerate(raw))
    if not isinstance(value, dict):
        return
    if "_target_" in value:
        try:
            yield from _check_call(locate(value["_target_"]), value, raw, path)
        except ConfigError as error:
            yield f"{path}._target_: {error}"
    else:
        for key, inner in value.items():
            if not isinstance(raw[key], str):  # else it is as it should be, or referred to
                yield from _check(inner, raw[key], f"{path}.{key}")


def _fits(value: Any, wanted: Any) -> bool:
    """Whether ``value``, once it is built, can be given where ``wanted`` is the annotation."""
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(wanted, config=ConfigDict(arbitrary_types_allowed=True))
        made = adapter.validate_python(_stand_in(value))
    except ValueError:  # pydantic's is one
        return False
    except Exception:  # an annotation that pydantic cannot read: the call itself will tell
        return True
    # Pydantic would take a text for a number, and a number for a truth value.
    return not isinstance(made, int | float) or (type(value), type(made)) == (int, float) or type(value) is type(made)


def _stand_in(value: Any) -> Any:
    """``value`` with a mock of the right class wherever an object will be built."""
    if isinstance(value, list):
        return [_stand_in(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if "_target_" not in value:
        return {key: _stand_in(inner) for key, inner in value.items()}
    target = locate(value["_target_"])
    if value.get("_partial_"):
        return partial(target)
    return Mock(spec=target if inspect.isclass(target) else get_type_hints(target)["return"])
