import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Optional, Union

import pytest

from boltcutter.config import instantiate
from boltcutter.config.errors import ConfigError
from boltcutter.config.instantiate import build, find_mistakes, locate, parameters
from boltcutter.config.settings import Settings

TOOLS = "tests_tools"
OWN = "boltcutter.tests_own"
AT = "<class, file and line>"
LISTED = "--describe box.tool lists its arguments"


class Tool:
    """A tool.

    Args:
        size: How large.
        kind: Which
            (one of two).
        path: Where.
    """

    def __init__(self, size: int, kind: Literal["saw", "axe"] = "saw", path: Optional[Path] = None) -> None:  # noqa: UP045
        if size < 0:
            raise ValueError(f"a tool of size {size}\ncannot be")
        self.size, self.kind, self.path = size, kind, path


class Box:
    """A box."""

    def __init__(
        self,
        tool: Union[Tool, str],  # noqa: UP007
        make: Callable[[int], Tool] | None = None,
        pair: tuple[float, float] = (0, 0),
        tools: Mapping[str, Tool] | None = None,
        **rest: Any,
    ) -> None:
        self.tool, self.make, self.pair, self.tools, self.rest = tool, make, pair, tools, rest


class Hidden:
    """Takes what its signature does not show."""

    __signature__ = inspect.Signature([inspect.Parameter("model_type", inspect.Parameter.KEYWORD_ONLY, default="")])

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)


class Wrapper:
    def __init__(self, model: Tool) -> None:
        self.model = model


class Closed:
    def __init__(self, size: int = 1) -> None: ...


class Fails:
    def __init__(self, how: str) -> None:
        raise {"type": TypeError, "value": ValueError, "runtime": RuntimeError}[how](f"{how} is\nwrong")


class OwnFails(Fails): ...


class Names:
    def __init__(self) -> None:
        raise ValueError("box.size=3 is too much; try 2")


@dataclass
class Base:
    size: int = 1


class Derived(Base):
    """Hands everything on.

    Args:
        extra: More.
    """

    def __init__(self, extra: int = 0, **base: Any) -> None:
        super().__init__(**base)


def make_tool(size: int) -> Tool:
    return Tool(size)


def make_untyped(size):  # type: ignore[no-untyped-def]
    return Tool(size)


def root(box: Box, n: int = 1, flag: bool = False, other: Closed | None = None, names: Sequence[str] = ()) -> None:
    """The top.

    Args:
        box: A box.
        n: A number.
    """


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The classes above in a foreign module, and in one of the project."""
    for name, members in (
        (TOOLS, (Tool, Box, Fails, Hidden, Wrapper, make_tool, make_untyped)),
        (OWN, (OwnFails, Names, Derived)),
    ):
        module = ModuleType(name)
        for member in members:
            monkeypatch.setattr(member, "__module__", name)
            setattr(module, member.__name__, member)
        module.HERE = "here"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    yield
    locate.cache_clear()
    parameters.cache_clear()


def cfg(box: dict[str, Any] | None = None, tool: dict[str, Any] | None = None, **top: Any) -> Settings:
    tool = {"_target_": f"{TOOLS}.Tool", "size": 3} | (tool or {})
    return Settings({"box": {"_target_": f"{TOOLS}.Box", "tool": tool} | (box or {})} | top)


def test_build() -> None:
    make = {"_target_": f"{TOOLS}.Tool", "_partial_": True, "kind": "axe"}
    box = build(cfg(tool={"path": "a/b"}, box={"make": make, "pair": [1, 2], "more": [{"x": None}]}).box)
    assert box.tool.path == Path("a/b")
    assert box.pair == (1.0, 2.0)
    assert isinstance(box.make, partial)
    assert (box.make(4).kind, box.make(4).size) == ("axe", 4)
    assert box.rest == {"more": [{"x": None}]}


def test_build_with_positional_arguments() -> None:
    node = {
        "_target_": "torch.nn.Sequential",
        "_args_": [{"_target_": "torch.nn.Linear", "_args_": [3, 2]}, {"_target_": "torch.nn.ReLU"}],
    }
    assert [type(layer).__name__ for layer in build(node)] == ["Linear", "ReLU"]
    assert build({"_target_": f"{TOOLS}.Tool", "_args_": [2, "axe"], "path": "a"}).path == Path("a")
    make = build({"_target_": f"{TOOLS}.Tool", "_partial_": True, "_args_": [2]})
    assert make(kind="axe").size == 2


def test_build_with_keyword_arguments_beyond_the_signature() -> None:
    assert build({"_target_": f"{TOOLS}.Hidden", "_check_": False, "size": 3}).size == 3


def test_build_with_what_is_known_only_now() -> None:
    assert build(cfg().box, "box", pair=(5, 6)).pair == (5, 6)
    assert build({"a": {"_target_": f"{TOOLS}.Tool", "size": 2.0}})["a"].size == 2


@pytest.mark.parametrize(
    ("node", "mistake"),
    [
        (
            {"_target_": f"{TOOLS}.Tool", "size": -1},
            f"box.tool.size=-1: a tool of size -1 cannot be ({AT}); correct it, or remove it",
        ),
        ({"_target_": f"{TOOLS}.Fails", "how": "type"}, f"box.tool: type is wrong ({AT}); {LISTED}"),
        ({"_target_": f"{TOOLS}.Fails", "how": "runtime"}, f"box.tool: runtime is wrong ({AT}); {LISTED}"),
        (
            {"_target_": f"{TOOLS}.Tool"},
            f"box.tool: Tool.__init__() missing 1 required positional argument: 'size' (TypeError); {LISTED}",
        ),
        ({"_target_": f"{OWN}.OwnFails", "how": "value"}, f"box.tool: value is wrong; {LISTED}"),
        ({"_target_": f"{OWN}.Names"}, "box.size=3 is too much; try 2"),
        (
            {"_target_": "no_such.thing"},
            "no_such.thing: no module named no_such; install the distribution that has no_such, or give the "
            "full dotted path of a class",
        ),
    ],
)
def test_a_value_is_refused(node: dict[str, Any], mistake: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(node, "box.tool")
    assert re.sub(r"\w+ at [\w/.]*tests/config/test_instantiate.py:\d+", AT, str(error.value)) == mistake
    assert error.value.__cause__ is not None or "no_such" in mistake  # for a traceback


def requires(how: str) -> None:
    if how == "text":
        raise ModuleNotFoundError("this needs Other: pip install other-package")
    if how == "module":
        importlib.import_module("no_such_package")
    raise ImportError("Requirement 'other-package>=2' not met")


@pytest.mark.parametrize(
    ("how", "package", "remedy"),
    [
        ("module", "no_such_package", "install the distribution that has no_such_package"),
        ("requirement", "other-package", "pip install other-package"),
        ("text", "", ""),
    ],
)
def test_a_package_that_a_class_needs_is_named(how: str, package: str, remedy: str) -> None:
    text = f"{package} is not installed; {remedy}$" if package else "this needs Other: pip install other-package"
    with pytest.raises(ConfigError, match=rf"^a\.b: {text}"):
        build({"_target_": f"{__name__}.requires", "how": how}, "a.b")


@pytest.mark.parametrize(("target", "name"), [("torch.optim.SGD", "params"), ("StepLR", "optimizer")])
def test_what_a_task_gives_is_named(target: str, name: str) -> None:
    target = target if "." in target else f"torch.optim.lr_scheduler.{target}"
    node = {"_target_": target} | ({"step_size": 1} if name == "optimizer" else {})
    mistakes = find_mistakes(Settings({"box": node}), boxed)
    assert len(mistakes) == 1
    assert mistakes[0].startswith(f"box.{name}: missing; ")
    assert mistakes[0].endswith("; write box._partial_=true, as the task gives it")


def boxed(box: Any) -> None: ...


@pytest.mark.parametrize("how", ["type", "runtime"])
def test_a_fault_in_own_code_is_no_mistake_of_the_user(how: str) -> None:
    with pytest.raises((TypeError, RuntimeError), match=how):
        build({"_target_": f"{OWN}.OwnFails", "how": how})


@pytest.mark.parametrize(
    ("given", "mistake"),
    [
        ({}, None),
        ({"n": "x"}, "n=x: expected int"),
        ({"n": "3"}, "n='3': expected int"),
        ({"n": "[3"}, "n='[3': expected int"),
        ({"n": True}, "n=true: expected int"),
        ({"n": None}, "n=null: expected int"),
        ({"n": 1.5}, "n=1.5: expected int"),
        ({"flag": 1}, "flag=1: expected bool"),
        ({"flag": "no"}, "flag=no: expected bool"),
        ({"nn": 1}, "nn: no such key; did you mean n?"),
        ({"quite": 1}, "quite: no such key; --print shows all"),
        ({"default": 1}, "default: no such key; did you mean defaults?"),
        ({"size": 1}, "size: no such key; did you mean box.tool.size?"),
        ({"tool": {"kind": "sow"}}, "box.tool.kind=sow: expected 'saw' | 'axe'; did you mean saw?"),
        ({"tool": {"sise": 1}}, "box.tool.sise: Tool takes no such argument; did you mean size?"),
        ({"tool": {"quite": 1}}, "box.tool.quite: Tool takes no such argument; --describe box.tool lists them"),
        ({"tool": {"size": "???"}}, "box.tool.size: not set; give box.tool.size=…"),
        ({"tool": {"_target_": f"{TOOLS}.Tol"}}, f"box.tool._target_: {TOOLS} has no Tol; did you mean Tool?"),
        ({"tool": {"_target_": f"{TOOLS}.HERE"}}, f"box.tool._target_: {TOOLS}.HERE cannot be called; give the"),
        (
            {"tool": {"_target_": "no_such.thing"}},
            "box.tool._target_: no_such.thing: no module named no_such; install the distribution",
        ),
        ({"tool": {"_target_": ".x"}}, "box.tool._target_: '.x' is not the dotted path of a class"),
        ({"tool": {"_target_": []}}, "box.tool._target_: '[]' is not the dotted path of a class"),
        ({"box": {"tool": "hammer"}}, None),
        ({"box": {"tool": None}}, "box.tool=null: expected Tool | str"),
        ({"box": {"tool": [1]}}, "box.tool=[1]: expected Tool | str"),
        ({"box": {"tool": {"_target_": f"{TOOLS}.make_tool", "size": 1}}}, None),
        ({"box": {"tool": {"_target_": f"{TOOLS}.make_untyped", "size": 1}}}, None),
        ({"box": {"tool": {"_target_": "pathlib.Path"}}}, "box.tool=pathlib.Path: expected Tool | str"),
        ({"box": {"pair": [1]}}, "box.pair=[1]: expected tuple[float, float]"),
        ({"box": {"pair": [1, "2"]}}, "box.pair=[1,'2']: expected tuple[float, float]"),
        ({"box": {"tools": {"a": {"_target_": f"{TOOLS}.Tool", "size": 1}}}}, None),
        ({"box": {"tools": {"a": {"_target_": f"{TOOLS}.Tool", "size": 1}, "b": 2}}}, "box.tools.b=2: expected Tool"),
        ({"box": {"tools": 2}}, "box.tools=2: expected Mapping[str, Tool] | null"),
        ({"box": {"anything": 1}}, None),
        ({"box": {"make": {"_target_": f"{TOOLS}.Tool", "_partial_": True}}}, None),
        ({"box": {"make": {"_target_": f"{TOOLS}.Tool"}}}, "box.make.size: missing; Tool needs it (int)"),
        ({"other": {"_target_": f"{OWN}.Derived", "extra": 1}}, f"other={OWN}.Derived: expected Closed | null"),
        ({"other": {"_target_": f"{OWN}.Derived", "sise": 1}}, "other.sise: Derived takes no such argument; did you"),
        ({"other": {"_target_": f"{OWN}.Derived", "size": "x"}}, "other.size=x: expected int"),
        ({"box": {"pair": "1,2"}}, "box.pair=1,2: expected tuple[float, float]; did you mean [1,2]?"),
        ({"other": {"size": 1}}, "other={size: 1}: expected Closed | null; add other._target_, the path of a class"),
        ({"names": "a"}, "names=a: expected Sequence[str]; did you mean [a]?"),
        ({"box": {"pair": "a,b"}}, "box.pair=a,b: expected tuple[float, float]"),
        ({"other": {"_target_": f"{TOOLS}.Hidden", "size": 1}}, "other.size: Hidden takes no such argument"),
        ({"box": {"tool": {"_target_": f"{TOOLS}.Hidden", "size": 1, "_check_": False}}}, "box.tool="),
        (
            {"box": {"more": {"_target_": f"{TOOLS}.Hidden", "size": {"_target_": "no.x"}, "_check_": False}}},
            "box.more.s",
        ),
        ({"box": {"more": {"_target_": f"{TOOLS}.Hidden", "size": 1, "_check_": False}}}, None),
        ({"box": {"more": {"_target_": f"{TOOLS}.Tool", "_args_": [1, "axe"]}}}, None),
        (
            {"box": {"more": {"_target_": f"{TOOLS}.Tool", "_args_": [1, "ax"]}}},
            "box.more._args_.1=ax: expected 'saw' |",
        ),
        ({"box": {"more": {"_target_": "torch.nn.ReLU", "_args_": 1}}}, "box.more._args_=1: expected a list; write"),
        (
            {"box": {"more": {"_target_": f"{TOOLS}.Tool", "_args_": [1, "saw", "a", 2]}}},
            "box.more._args_: Tool takes 3 positional arguments, got 4",
        ),
        ({"box": {"more": {"_target_": f"{TOOLS}.Tool", "_args_": [1], "size": 2}}}, "box.more.size: given twice"),
        (
            {
                "box": {
                    "more": {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.ReLU", "inplac": 1}]}
                }
            },
            "box.more._args_.0.inplac: ReLU takes no such argument; did you mean inplace?",
        ),
        ({"n": "${nope}"}, "n: ${nope} refers to nothing; set n=…, or add nope"),
        ({"n": "${box.much}"}, "n: ${box.much} refers to nothing; set n=…, or add box.much"),
        ({"n": "${boxx.pair}", "box": {"pair": [1, 2]}}, "n: ${boxx.pair} refers to nothing; did you mean box.pair?"),
        ({"n": "${n}"}, "n: Recursive interpolation detected; correct the reference"),
        ({"n": "${oc.env:NO_SUCH}"}, "n: environment variable NO_SUCH is not set; export NO_SUCH=…"),
        (
            {"n": "${oc.nope:X}"},
            "n: Unsupported interpolation type oc.nope; register oc.nope in the module",
        ),
        ({"tool": {"size": "${n}"}, "n": "???"}, "n: not set; give n=…"),
        ({"tool": {"size": "${n}"}, "n": "x"}, "n=x: expected int"),
    ],
)
def test_check(given: dict[str, Any], mistake: str | None) -> None:
    found = find_mistakes(cfg(**given), root)
    if mistake is None:
        assert not found
    else:
        assert len(found) == 1
        assert found[0].startswith(mistake)


def test_all_mistakes_are_reported_at_once() -> None:
    found = find_mistakes(cfg(n="x", flag=1, tool={"sise": 1}), root)
    assert [line.split(":")[0] for line in found] == ["box.tool.sise", "n=x", "flag=1"]


def test_a_mistake_behind_a_reference_is_reported_where_it_is_written() -> None:
    def top(box: Box, shared: Tool) -> None: ...

    shared = {"_target_": f"{TOOLS}.Tool", "size": "x"}
    assert find_mistakes(cfg(box={"tool": "${shared}"}, shared=shared), top) == ["shared.size=x: expected int"]
    shared = {"_target_": f"{TOOLS}.Toll"}
    assert find_mistakes(cfg(box={"tool": "${shared}"}, shared=shared), top) == [
        f"shared._target_: {TOOLS} has no Toll; did you mean Tool?"
    ]


def test_a_group_that_is_an_argument_is_checked_as_such() -> None:
    def top(box: Box, choices: dict[str, str]) -> None: ...

    chosen = cfg(choices={"box": "small", "spare": "large"}, spare={"_target_": f"{TOOLS}.Tool", "size": "x"})
    assert find_mistakes(chosen, top) == ["spare.size=x: expected int"]


def test_modules_of_another_framework_are_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instantiate, "adapter", lambda kind: f"{TOOLS}.Wrapper" if kind is Tool else None)
    made = build(cfg(box={"kept": {"_target_": f"{TOOLS}.Tool", "size": 1}}).box).rest["kept"]
    assert isinstance(made, Wrapper)
    assert isinstance(made.model, Tool)  # which the parameter of the wrapper takes


def test_an_abstract_class_is_refused() -> None:
    message = "data._target_=collections.abc.Sequence: __getitem__, __len__: not defined; add to the class"
    with pytest.raises(ConfigError, match=re.escape(message)):
        build({"_target_": "collections.abc.Sequence"}, "data")


class KeepsSettings:
    """Instantiates a part of its own settings, as classes that are made for Hydra do."""

    def __init__(self, net: Any, layers: list[Any], lr: float = 0.1) -> None:
        self.net, self.layers, self.lr = net, layers, lr


def test_settings_that_a_class_instantiates_itself_are_passed_as_they_are() -> None:
    own = f"{__name__}.KeepsSettings"
    settings = {"net": {"_target_": "no.such.Net", "size": 2}, "layers": [{"_target_": "x"}], "lr": "${seed}"}
    cfg = Settings({"seed": 3, "task": {"_target_": own, "_recursive_": False, **settings}})
    made = build(cfg.task, "task")
    assert (made.net._target_, made.net.size, made.layers[0]["_target_"], made.lr) == ("no.such.Net", 2, "x", 3)
    root = lambda task, seed: None  # noqa: E731
    assert find_mistakes(cfg, root) == []
    cfg = cfg.changed({"task": {"_recursive_": True}})
    assert any("no.such.Net" in mistake for mistake in find_mistakes(cfg, root))
    settings = {"_recursive_": False, "optimizer": {"_target_": "torch.optim.SGD"}}
    cfg = Settings({"constants": settings, "choices": {"constants": "default"}})
    assert find_mistakes(cfg, lambda choices: None) == []
