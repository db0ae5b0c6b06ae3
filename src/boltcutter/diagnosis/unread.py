"""What code is given or makes, and never reads: arguments without effect, layers, averages. For probes only."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import sys
import textwrap
import types
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from boltcutter.diagnosis.averages import CHANGES
from boltcutter.diagnosis.calls import is_equal
from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.evidence import Evidence, sampled, tensors_of
from boltcutter.diagnosis.probe import Trace, is_close
from boltcutter.diagnosis.results import Place, Unread
from boltcutter.diagnosis.source import Place as Function
from boltcutter.diagnosis.source import (
    callback_classes,
    codes_of_users,
    depends_on_time,
    functions_of,
    is_function,
    is_own_file,
    own_classes,
    says,
    tree_of,
)
from boltcutter.diagnosis.statements import SCOPES
from boltcutter.structure import flatten

# Arguments whose value is meant to change a training, unlike a size that a file may state once more.
EFFECTIVE = re.compile(
    r"^((base_|max_|init_|initial_|encoder_|head_|backbone_|generator_|critic_)*(lr|learning_rate)|weight_decay|wd|momentum"
    r"|(\w+_)?(dropout|drop_rate|drop_prob|p_drop)(_\w+)?|label_smoothing|smoothing|margin|temperature|tau|gamma|betas?"
    r"|class_weights?|pos_weight|warmup\w*|(lambda|weight)_\w+|grad_clip|clip\w*|noise_(std|scale|level))$"
)
# Names that other libraries or papers have for what a class of torch reads.
RATES = {
    **dict.fromkeys(("learning_rate", "lrate", "LR", "rate", "step_size"), "lr"),
    **dict.fromkeys(("wd", "decay", "l2", "weightdecay"), "weight_decay"),
}
MEANT: dict[str, dict[str, str]] = {
    "_DropoutNd": dict.fromkeys(("prob", "probability", "rate", "drop", "dropout", "drop_prob", "drop_rate"), "p"),
    "_NormBase": {"epsilon": "eps", "decay": "momentum", "mom": "momentum", "momentun": "momentum"},
    "LayerNorm": {"epsilon": "eps"},
    "GroupNorm": {"epsilon": "eps"},
    "LeakyReLU": {"slope": "negative_slope", "alpha": "negative_slope"},
    "CrossEntropyLoss": {"smoothing": "label_smoothing", "weights": "weight", "class_weights": "weight"},
    "Optimizer": {"lr": "lr", "momentum": "momentum", "weight_decay": "weight_decay", **RATES},
}
CLOSE = 0.9
PASSES = re.compile(r"[(, ]self[,)]")
MOST_FILES = 200
MOST_RESULTS = 3
FEWEST, FEW, ALIKE = 8, 0.3, 0.5  # values, share of them, and correlation
DROPS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
WHOLE = re.compile(r"hparams(?!\.|\[\"|\['|\w)|locals\(|vars\(|__dict__|getattr\(|\*\*kwargs|asdict")
EVALUATES = re.compile(
    r"valid|val_|test|predict|eval|sample|generate|save|export|forward|checkpoint|swap|store|restore"
)
THAWS = re.compile(r"^on_(train|fit|validation|before|after)|unfreeze|thaw|^finetune_function$")
NAMED = re.compile(r"(^|_)(ema|averaged?|avg|shadow|polyak|swa)(_|$)")
CONVERSIONS = ("torch.tensor", "torch.as_tensor", "torch.FloatTensor", "torch.Tensor", "float", "int", "nn.Parameter")
BACKWARD = frozenset(("manual_backward", "backward", "mse_loss", "cross_entropy"))


@check("unread-argument", "likely", at="probe")
def unread_argument(seen: Evidence) -> Lines:
    """No code reads an argument of a constructor that is meant to change the training, as a rate or class weights."""
    text = files_of(seen)
    if PASSES.search(re.sub(r"def \w+\(.*|super\(.*", "", text)):
        return  # a function gets the object, and may read it
    for part in _first_of_each_class(seen.module):
        for cls in own_classes(type(part)):
            init = vars(cls).get("__init__")
            tree = tree_of(init) if isinstance(init, types.FunctionType) else None
            if tree is None or not isinstance(init, types.FunctionType) or type(part).__init__ is not init:
                continue
            for name in _parameters(tree):
                is_effective = any(map(EFFECTIVE.match, (name, *_kept_as(name, tree)[0])))
                if is_effective and not _is_read(name, tree, text) and _is_set(part, name, init):
                    yield Line(
                        f"{cls.__name__} takes {name}, but no code reads it, so it has no effect; use it, or remove it",
                        subject=f"{cls.__name__}.{name}",
                    )


@check("unread-attribute", "likely", at="probe")
def set_by_callback(seen: Evidence) -> Lines:
    """A callback sets an attribute of the module that only its constructor reads, and a part has one of that name."""
    own = {cls: [f for f in vars(cls).values() if is_function(f)] for cls in own_classes(type(seen.module))}
    reads = {
        node.attr
        for functions in own.values()
        for f in functions if f.__name__ != "__init__" and (tree := tree_of(f)) is not None
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == "self"
    }  # fmt: skip
    for cls in callback_classes(seen.trainer):
        trees = [(f, tree) for f in vars(cls).values() if is_function(f) and (tree := tree_of(f)) is not None]
        text = "\n".join(ast.unparse(tree) for _, tree in trees)
        for function, node in ((f, n) for f, tree in trees for n in ast.walk(tree) if isinstance(n, ast.Assign)):
            if not isinstance(target := node.targets[0], ast.Attribute):
                continue
            owner, key = ast.unparse(target.value), target.attr
            copies = [n for n, m in seen.module.named_modules() if n and key in vars(m) and own_classes(type(m))]
            is_read = (
                len({*re.findall(rf"([\w.]+)\.{key} = ", text)}) > 1
                or key in reads
                or re.search(rf"{re.escape(owner)}\.{key}\b(?! = )", text)
                or "." in owner
            )
            if owner in ("pl_module", "module", "model") and key in vars(seen.module) and copies and not is_read:
                line = function.__code__.co_firstlineno + node.lineno - 1
                yield Line(
                    f"{cls.__name__}.{function.__name__} (line {line}) sets {key} of the module, which nothing reads "
                    f"after its constructor: {copies[0]} has a copy of it from then; set {owner}.{copies[0]}.{key}",
                    subject=key,
                )


@check("unread-attribute", "likely", at="trial")
def unread_attribute(seen: Evidence) -> Lines:
    """A layer, a parameter or an optimizer is given an attribute or key that nothing reads, beside what torch reads."""
    text = files_of(seen)
    owners: list[tuple[str, Any, dict[str, Any]]] = [
        (name, m, vars(m)) for name, m in seen.module.named_modules() if type(m).__module__.startswith("torch.nn.")
    ]
    owners += [(type(o).__name__, o, vars(o)) for o in seen.optimizers if type(o).__module__.startswith("torch.")]
    for name, owner, given in owners:
        for key in given:
            if meant := _meant(owner, key, text):
                yield Line(
                    f"{name}.{key} is set, but nothing reads it, so it changes nothing; {_instead(owner, meant)}",
                    subject=key,
                )
    for optimizer in seen.optimizers:
        for key in {key for group in optimizer.param_groups for key in group if isinstance(key, str)}:
            meant = RATES.get(key, "")
            is_read = re.search(rf"[\[(][\"']{key}[\"'][,)\]](?!\s*=[^=])", text)
            if key not in optimizer.defaults and meant in optimizer.defaults and not is_read:
                yield Line(
                    f'the parameter groups of {type(optimizer).__name__} have "{key}", which it does not read, so it '
                    f'changes nothing; set "{meant}"',
                    subject=key,
                )
    own = [
        tree
        for cls in callback_classes(seen.trainer)
        for f in vars(cls).values()
        if is_function(f) and (tree := tree_of(f))
    ]
    for tree in (*(place.tree for place in functions_of(seen.module)), *own):
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.Assign)):
            for target in node.targets:
                key = target.attr if isinstance(target, ast.Attribute) else ""
                is_own = key != "requires_grad_" and re.search(rf"\.{key}\b(?!\s*=[^=])", text)
                if (
                    key != "requires_grad"
                    and not is_own
                    and difflib.SequenceMatcher(None, key, "requires_grad").ratio() > CLOSE
                ):
                    yield Line(
                        f"`{ast.unparse(target)}` is set, but nothing reads it; write requires_grad", subject=key
                    )


def _meant(owner: Any, key: str, text: str) -> str:
    """What torch reads, where it does not read an attribute that was set; empty if other code may read it."""
    kind = next((kind.__name__ for kind in type(owner).__mro__ if kind.__name__ in MEANT), "")
    if not (meant := MEANT.get(kind, {}).get(key, "")):
        return ""
    before = r"opt\w*(\(\))?(\.optimizer)?" if kind == "Optimizer" else ""  # a module has a rate, too
    is_read = re.search(rf"{before}\.{key}\b(?!\s*=[^=])", text) or (
        not before and re.search(rf"[\"']{key}[\"']", text)
    )
    return "" if is_read else meant


def _instead(owner: Any, meant: str) -> str:
    if isinstance(owner, torch.optim.Optimizer):
        return f'set group["{meant}"] of each group of param_groups'
    return f"set {meant}"


def _first_of_each_class(module: nn.Module) -> Iterator[nn.Module]:
    known = set[type]()
    for part in module.modules():
        if type(part) not in known:
            known.add(type(part))
            yield part


def files_of(seen: Evidence) -> str:
    """The source of the user's files: those of the module's classes, of callbacks and data, and what these import."""
    data = getattr(seen.trainer, "datamodule", None)
    owners = [*seen.module.modules(), *getattr(seen.trainer, "callbacks", []), *([data] if data is not None else [])]
    known, queue = set[str](), [cls.__module__ for owner in owners for cls in own_classes(type(owner))]
    while queue and len(known) < MOST_FILES:
        if (name := queue.pop()) in known or not is_own_file(getattr(sys.modules.get(name), "__file__", None)):
            continue
        known.add(name)
        for value in vars(sys.modules[name]).values():
            queue.append(
                value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", "") or ""
            )
    return "\n".join(map(source_of, sorted(known)))


@cache
def source_of(name: str) -> str:
    """The source of a file, without comments; empty if there is none, as in a notebook."""
    try:
        return ast.unparse(ast.parse(inspect.getsource(sys.modules[name])))
    except (OSError, TypeError, SyntaxError, ValueError, KeyError):
        return ""


def _parameters(tree: ast.FunctionDef) -> list[str]:
    return [a.arg for a in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)][1:]


def _is_read(name: str, tree: ast.FunctionDef, text: str) -> bool:
    """Whether code reads an argument, or the attribute, buffer or hyperparameter that keeps it."""
    if not text or WHOLE.search(text.replace("self.save_hyperparameters", "")):
        return True  # by a name that is not written out
    kept, stored = _kept_as(name, tree)
    if sum(isinstance(n, ast.Name) and n.id == name for n in ast.walk(tree)) > stored:
        return True
    if "save_hyperparameters" in ast.unparse(tree):
        if name in ("temperature", "tau"):
            return True  # of sampling, elsewhere
        kept.add(name)
    for key in kept:
        reads = re.findall(rf"\.{key}\b(?!\s*=[^=])(?!: )|['\"]{key}['\"]", text)
        writes = re.findall(rf"register_buffer\(['\"]{key}['\"]", text)
        if len(reads) > len(writes):
            return True
    return False


def _kept_as(name: str, tree: ast.FunctionDef) -> tuple[set[str], int]:
    """The attributes and buffers that keep an argument as it is, and how often they name it."""
    kept, stored = set[str](), 0
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if isinstance(node, ast.Assign) and isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            if _is_kept_as_it_is(node.value, name):
                kept.add(target.attr)
                stored += 1
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "self.register_buffer" and len(node.args) > 1:
            key, value = node.args[:2]
            if isinstance(key, ast.Constant) and _is_kept_as_it_is(value, name):
                kept.add(str(key.value))
                stored += 1
    return kept, stored


def _is_kept_as_it_is(value: ast.expr, name: str) -> bool:
    """Whether a value is the argument, or a tensor or number that is made of it alone."""
    if isinstance(value, ast.Call) and len(value.args) == 1 and ast.unparse(value.func) in CONVERSIONS:
        return _is_kept_as_it_is(value.args[0], name)
    return isinstance(value, ast.Name) and value.id == name


def _is_set(part: nn.Module, name: str, init: types.FunctionType) -> bool:
    """Whether the argument has a value that is not 0, None or False."""
    hparams = getattr(part, "hparams", None)
    for value in (vars(part).get(name), part._buffers.get(name), hparams.get(name) if hparams else None):
        if value is not None:
            return bool(value.any()) if isinstance(value, Tensor) else bool(value)
    default = inspect.signature(init).parameters[name].default
    return default is inspect.Parameter.empty or bool(default)


@check("unread-argument", "likely", at="probe")
def unread_dropout(seen: Evidence) -> Lines:
    """No code mentions a dropout layer that a class with a forward of its own has made."""
    text = files_of(seen)
    if not text or re.search(r"children\(|modules\(|_modules|getattr\(|vars\(", text):
        return
    for part in _first_of_each_class(seen.module):
        classes = own_classes(type(part))
        if not any(vars(cls).get("forward") for cls in classes) or isinstance(part, nn.Sequential):
            continue
        for name, layer in part._modules.items():
            reads = re.findall(rf"\.{re.escape(name)}\b(?!\s*=[^=])(?!: )|['\"]{re.escape(name)}['\"]", text)
            if isinstance(layer, DROPS) and layer.p > 0 and not reads and f".{name} = " in text:
                yield Line(
                    f"{type(part).__name__}.{name} is a dropout of {layer.p:g} that no code calls; call it in forward, "
                    "or remove it",
                    subject=f"{type(part).__name__}.{name}",
                )


class _Changed(TorchFunctionMode):
    """One call of a function returns other values."""

    def __init__(self, unread: Unread) -> None:
        super().__init__()
        self.unread, self.count = unread, 0

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") == self.unread.name:
            self.count += 1
            return result + 1 if self.count == self.unread.number else result
        return result


@check("unused-value", "likely", at="probe")
def unused_result(seen: Evidence) -> Lines:
    """No operation reads the output of a dropout, norm or activation, no module returns it, and nothing keeps it."""
    probe, kind = seen.probe, "training_step"
    if probe is None or kind not in probe.batches:
        return
    base = probe.base(kind)
    for unread in base.unread_results[:MOST_RESULTS]:
        if not _is_lost(unread.places):
            continue
        with _Changed(unread):
            other = probe.run(kind, probe.batches[kind], training=True, record=False)
        if not _is_same(base, other):
            continue
        outputs = (n for n, t in base.tensors if n.startswith("the output of ") and t.data_ptr() == unread.memory)
        name = next(outputs, f"the output of {unread.name}()")
        yield Line(
            f"{name}, of {unread.shape}, is computed in each step, and nothing reads it: is another variable passed "
            "on in its place?",
            "note" if depends_on_time(seen.module) else None,
            subject=name,
        )


class Dropped(NamedTuple):
    """A value that a function assigns to a name that it never reads.

    Args:
        place: The function.
        name: The name.
        of: Names of which it is computed, and which are read later.
        line: Of the file.
    """

    place: Function
    name: str
    of: tuple[str, ...]
    line: int


@check("unused-value", "likely", at="probe")
def unused_substitute(seen: Evidence) -> Lines:
    """Nothing reads the name of what a step has changed at random in a part of its batch, or of adapted weights."""
    probe, kind = seen.probe, "training_step"
    dropped = [each for place in functions_of(seen.module) for each in dropped_values(place)]
    if probe is None or kind not in probe.batches or not dropped:
        return
    one, other = (_locals_of(seen, dropped, seed) for seed in (0, 1))
    parts = [t for t in tensors_of(probe.batches[kind]) if t.numel() > 1]
    for each in dropped:
        values = [found[each] for found in (one, other) if each in found]
        if len(values) < 2:
            continue
        first = values[0][each.name]
        same = [n for n in each.of if isinstance(first, Tensor) and _is_substitute(first, values[0].get(n), parts)]
        if same and bool((first != values[1][each.name]).any()):
            text = f"{each.name}, in which {each.place.name} (line {each.line}) has changed {same[0]} at random, is"
            where = f", and {same[0]} is used in its place"
        elif _are_weights(seen, first) and probe.base(kind).differentiates:
            text = f"{each.name}, the adapted weights that {each.place.name} (line {each.line}) computes, are"
            where = ", so the loss is that of the weights before they are adapted"
        else:
            continue
        yield Line(f"{text} never used{where}; pass it on", subject=f"{each.place.name}:{each.name}")


def dropped_values(place: Function) -> Iterator[Dropped]:
    """Names that a function assigns once, to the result of a call or a formula, and never reads."""
    nodes = [*ast.walk(place.tree)]
    names = [n for n in nodes if isinstance(n, ast.Name)]
    read = {n.id for n in names if isinstance(n.ctx, ast.Load)}
    stored = Counter(n.id for n in names if isinstance(n.ctx, ast.Store))
    for node in nodes if not read & SCOPES else ():
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if not isinstance(target, ast.Name) or not isinstance(node, ast.Assign) or target.id in read:
            continue
        if stored[target.id] > 1 or target.id[:1] == "_" or not isinstance(node.value, ast.Call | ast.BinOp):
            continue
        own = [*ast.walk(node.value)]
        of = {n.id for n in own if isinstance(n, ast.Name)}
        later = {n.id for n in names if isinstance(n.ctx, ast.Load) and n.lineno >= node.lineno and n not in own}
        yield Dropped(place, target.id, tuple(sorted(of & later)), place.line + node.lineno - 1)


def _locals_of(seen: Evidence, dropped: list[Dropped], seed: int) -> dict[Dropped, dict[str, Any]]:
    """The local variables of these functions, as they return in a training step."""
    found: dict[Dropped, dict[str, Any]] = {}
    wanted: dict[tuple[str, int], list[Dropped]] = {}
    for each in dropped:
        wanted.setdefault((each.place.tree.name, each.place.line), []).append(each)

    def look(frame: types.FrameType, event: str, value: Any) -> None:
        if event == "return":
            for each in wanted.get((frame.f_code.co_name, frame.f_code.co_firstlineno), ()):
                if each.name in frame.f_locals:
                    found[each] = {n: frame.f_locals[n] for n in (each.name, *each.of) if n in frame.f_locals}

    before, probe = sys.getprofile(), seen.probe
    sys.setprofile(look)
    try:
        probe.run(  # type: ignore[union-attr]
            "training_step",
            probe.batches["training_step"],  # type: ignore[union-attr]
            training=True,
            seed=seed,
            record=False,
        )
    finally:
        sys.setprofile(before)
    return found


def _is_substitute(value: Tensor, of: Any, parts: list[Tensor]) -> bool:
    """Whether values are those of a part of the batch, some of which have changed."""
    if not isinstance(of, Tensor) or value.shape != of.shape or value.dtype != of.dtype or value.numel() < FEWEST:
        return False
    if not any(is_equal(of, part) for part in parts):
        return False
    if not value.is_floating_point():
        return FEW < float((value == of).float().mean()) < 1
    pair = torch.stack([value.detach().flatten().double(), of.flatten().double()])
    return bool((value != of).any()) and float(torch.corrcoef(pair)[0, 1]) > ALIKE


def _are_weights(seen: Evidence, value: Any) -> bool:
    """Whether values have the shapes of all weights of a part of the module, and are others."""
    tensors = [t for t in flatten(value) if isinstance(t, Tensor)] if isinstance(value, dict | list | tuple) else []
    if len(tensors) < 2 or not all(t.is_floating_point() for t in tensors):
        return False
    held = {t.data_ptr() for t in seen.module.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
    shapes = [t.shape for t in tensors]
    is_part = any([p.shape for p in part.parameters()] == shapes for part in seen.module.modules())
    return is_part and not any(t.data_ptr() in held for t in tensors)


def _is_lost(places: tuple[Place, ...]) -> bool:
    """Whether what a call returns is assigned to a variable that is not named again, or first in an assignment."""
    for code, line in places:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
        except (OSError, TypeError, SyntaxError, ValueError):  # typed in, or generated
            return False
        line += 1 - code.co_firstlineno
        inside = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or 0)]
        statement = inside[-1] if inside else None
        if isinstance(statement, ast.Return):
            continue  # its caller has it
        is_one = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        target = statement.targets[0] if is_one else None  # type: ignore[union-attr]
        if not isinstance(target, ast.Name) or not isinstance(statement.value, ast.Call):  # type: ignore[union-attr]
            return False
        loops = [node for node in inside if isinstance(node, ast.For | ast.While)]
        added = {n.target for n in ast.walk(tree) if isinstance(n, ast.AugAssign)}
        own = {*ast.walk(statement)}  # type: ignore[arg-type]
        names = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == target.id and n not in own]
        reads = {n for n in names if isinstance(n.ctx, ast.Load) or n in added}
        if any(n in reads for loop in loops for n in ast.walk(loop)):
            return False
        later = min((n for n in names if n.lineno > line), key=lambda n: (n.lineno, n not in reads), default=None)
        if any(isinstance(n, ast.Return) and n.value is later for n in ast.walk(tree)) and later is not None:
            continue
        return later not in reads
    return False


def _is_same(one: Trace, other: Trace) -> bool:
    """Whether two passes have returned, logged and passed to loss functions the same values."""
    pairs = [*zip(tensors_of([one.output, one.logged]), tensors_of([other.output, other.logged]), strict=False)]
    pairs += [(a.prediction, b.prediction) for a, b in zip(one.calls, other.calls, strict=False)]
    return all(is_close(a.detach(), b.detach()) for a, b in pairs)


OF_LOSS = re.compile("loss|nll|elbo", re.IGNORECASE)
OF_NOISE = re.compile("loss|nll|elbo|mse|mae|bpd|error|vlb|noise", re.IGNORECASE)
DIFFUSES = re.compile("diffus|denois|noise|ddpm", re.IGNORECASE)


@check("average-unread", "likely", at="trial")
def average_unread(seen: Evidence) -> Lines:
    """Code changes a frozen copy of a trained part after each step, but neither a step nor any other code reads it."""
    probe = seen.probe
    if probe is None or not {"training_step", "validation_step"} <= probe.batches.keys():
        return
    found = codes_of_users(seen.module, seen.trainer)
    traces = [probe.base(kind) for kind in ("training_step", "validation_step")]
    for name, part in seen.module.named_children():
        weights = dict(part.named_parameters())
        if not weights or any(p.requires_grad for p in weights.values()):
            continue
        before = {n: seen.start[f"{name}.{n}"] for n in weights if f"{name}.{n}" in seen.start}
        if len(before) < len(weights) or not any(not torch.equal(before[n], sampled(p)) for n, p in weights.items()):
            continue
        is_called = any(n == name or n.startswith(f"{name}.") for trace in traces for n in trace.inputs)
        mentions = [code for code in found if name in code.co_names or name in code.co_consts]
        others = [c for c in mentions if c.co_name != "__init__"]
        is_read = any(EVALUATES.search(c.co_name) or not CHANGES & {*c.co_names} for c in others)
        is_read |= not NAMED.search(name) or any(BACKWARD & {*c.co_names} for c in mentions)
        if mentions and not is_called and not is_read and not _is_dynamic(found):
            of_loss = OF_NOISE if says(seen.module, DIFFUSES) else OF_LOSS
            measures = [n for n in traces[1].logged if not of_loss.search(n)]
            yield Line(
                f"{name} is updated in training, but neither validation nor any other code uses it, so its metrics are "
                "those of the trained weights; evaluate it in validation_step",
                None if measures else "note",  # of a diffusion model, samples are drawn with it elsewhere
                subject=name,
            )


def _is_dynamic(found: set[types.CodeType]) -> bool:
    """Whether code takes hold of parts by names that are not written out."""
    return any({"getattr", "named_children", "children", "_modules"} & {*code.co_names} for code in found)


@check("thawed", "likely", at="trial")
def thawed_later(seen: Evidence) -> Lines:
    """Code of a hook, or of what it calls, thaws parameters that are in no optimizer, and none adds them to one."""
    found = codes_of_users(seen.module, seen.trainer)
    names = {name for code in found for name in code.co_names}
    frozen = [n for n in sorted(seen.frozen) if id(seen.parameters[n]) not in seen.optimized()]
    if not frozen or names & {"add_param_group", "unfreeze_and_add_param_group", "setup_optimizers", "optimizers"}:
        return
    for code in found:
        thaws = {"requires_grad_", "requires_grad", "unfreeze"} & {*code.co_names} and True in code.co_consts
        thaws = thaws or "make_trainable" in code.co_names  # of Lightning's BaseFinetuning
        names = {part for n in frozen for part in n.split(".")} & {*code.co_names}
        others = {n for n, part in seen.module.named_children() if any(id(p) in seen.owned for p in part.parameters())}
        of_input = "requires_grad_" in code.co_names and "grad" in code.co_names  # for a gradient of what goes in
        if thaws and names and not others & {*code.co_names} and THAWS.search(code.co_name) and not of_input:
            yield (
                f"{code.co_name} thaws {sorted(names)[0]}, but {some(frozen)} is in no optimizer, and no code adds it "
                "to one, so it stays as it is; call optimizer.add_param_group, or give the optimizer all parameters"
            )
            return
