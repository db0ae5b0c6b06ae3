"""What the names in the user's code say: exchanged arguments, deviations for variances, values of the last batch."""

from __future__ import annotations

import ast
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence, is_metric
from boltcutter.diagnosis.samples import depends_on_padding
from boltcutter.diagnosis.source import codes, functions_beside, is_function, members, own_classes, tree_of
from boltcutter.diagnosis.statements import called_name

LESS_IS_BETTER = re.compile("energ|dist(ance)?|cost|error", re.IGNORECASE)
# Words that mean the same.
WORDS = {
    **dict.fromkeys(("pos", "positives"), "positive"),
    **dict.fromkeys(("neg", "negatives"), "negative"),
    **dict.fromkeys(("wd", "decay"), "weight_decay"),
    **dict.fromkeys(("mu", "means"), "mean"),
    **dict.fromkeys(("sigma", "stddev", "stds", "stdev", "sd"), "std"),
    "src": "source",
    "tgt": "target",
    "users": "user",
    "items": "item",
    "students": "student",
    "teachers": "teacher",
    "learning_rate": "lr",
}
# Functions that are the same with their arguments exchanged.
SYMMETRIC = re.compile(r"mse|l1|huber|cosine|distance|close|equal|swap|exchange|revers|invert|symmetric|cycle|back")
# Names that never stand for each other; others may, as of a divergence, or of a translation, in both directions.
OPPOSITES = (
    *({"positive", "negative"}, {"lr", "weight_decay"}, {"mean", "std"}, {"user", "item"}),
    {"input_lengths", "target_lengths"},
)
LIKELIHOODS = frozenset(("gaussian_nll_loss",))
VARIANCES = frozenset(("var", "variance", "variances", "logvar", "log", "logstd", "sigma2", "sq", "squared"))
DEVIATIONS = frozenset(("std", "stddev", "stdev", "stds", "sd", "sigma"))
EPOCH_ENDS = {"validation_step": "on_validation_epoch_end", "test_step": "on_test_epoch_end"}
PADDED = re.compile(r"mask|len(gth)?s?($|_)", re.IGNORECASE)
LABELS = re.compile(r"y[0-9]?|labels?|targets?|class(es)?|cls|ind(ex|ices)|idx|ids?|_.*", re.IGNORECASE)
OF_ONE = re.compile(r"last|latest|recent|first|sample|example|picture|image|probe|reference", re.IGNORECASE)
OF_TRAINING = re.compile(r"train_?(mask|idx|ids|index|indices|nodes|edges|edge_index|labels?)")
BATCHES = frozenset(("batch", "data", "sample", "graph"))
TRANSFORMS = re.compile(r"transform|augment|^train(ing)?$|^mode$")
EACH_EPOCH = re.compile(r"(^|\.)on_train_epoch_(start|end)$|(^|\.)on_validation_epoch_(start|end)$")
SQUARED = re.compile(r"\*\* ?2|\.pow\(2|square|var|sqrt|exp\(")


class Code(NamedTuple):
    """A function of the user's code.

    Args:
        name: As ``Class.method``.
        tree: Its definition.
        owner: The object whose class has it; None of a plain function.
        names: Global names of its file.
        line: Of its file, where it begins.
    """

    name: str
    tree: ast.FunctionDef
    owner: Any
    names: dict[str, Any]
    line: int


def code_of(seen: Evidence) -> Iterator[Code]:
    """Methods of the module, layers, data module, datasets and callbacks, and functions beside them that they call."""
    callbacks = getattr(seen.trainer, "callbacks", [])
    owners: list[Any] = [*seen.module.modules(), getattr(seen.trainer, "datamodule", None), *callbacks]
    for name in seen.splits.loaders if seen.splits else ():
        dataset = seen.splits.dataset(name)  # type: ignore[union-attr]
        while isinstance(dataset, Subset):
            owners.append(dataset)
            dataset = dataset.dataset
        owners.append(dataset)
    known, classes = set[types.CodeType](), set[type]()
    for owner in owners:
        for cls in own_classes(type(owner)) if owner is not None else ():
            if cls.__module__.startswith("boltcutter.") or cls in classes:
                continue
            classes.add(cls)
            used = {name for code in codes(cls) for name in code.co_names}
            beside = [f for f in functions_beside(cls) if f.__name__ in used]
            own = [(owner, getattr(value, "__func__", value)) for each, value in members(type(owner)) if each is cls]
            for holder, function in (*own, *((None, function) for function in beside)):
                if not is_function(function) or function.__code__ in known:
                    continue
                known.add(function.__code__)
                tree = tree_of(function)
                if tree is not None:
                    first = function.__code__.co_firstlineno
                    yield Code(function.__qualname__.rpartition(">.")[2], tree, holder, function.__globals__, first)


def callable_of(call: ast.Call, code: Code) -> Any:
    """What a call calls: of a layer its forward; None if the names of the file and of the object do not tell."""
    try:
        first, *path = ast.unparse(call.func).split(".")
    except ValueError:
        return None
    if any(isinstance(n, ast.Name) and n.id == first and isinstance(n.ctx, ast.Store) for n in ast.walk(code.tree)):
        return None
    if first != "self" and any(isinstance(n, ast.arg) and n.arg == first for n in ast.walk(code.tree)):
        return None
    found = code.owner if first == "self" else code.names.get(first)
    for name in (*path, *(("forward",) if isinstance(found, nn.Module) and not path else ())):
        found = member_of(found, name)
    return member_of(found, "forward") if isinstance(found, nn.Module) else found


def member_of(owner: Any, name: str) -> Any:
    """An attribute, without code of the user's: None for a property, or if there is none."""
    kind = inspect.getattr_static(type(owner), name, None)
    if isinstance(kind, property) or (hasattr(type(kind), "__get__") and not callable(getattr(kind, "__func__", kind))):
        return None
    try:
        return getattr(owner, name, None)
    except Exception:  # of a __getattr__ of the user's own
        return None


def parameters_of(function: Any) -> list[str]:
    """Names of the parameters that can be given by position, without ``self``."""
    if function is None or not callable(function):
        return []
    try:
        found = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # of a function in C
        return []
    return [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def word_of(node: ast.expr) -> str:
    """The last name of a value: of ``self.lr`` lr, of ``batch["positive"]`` positive; empty for an expression."""
    if isinstance(node, ast.Name):
        return node.id.lower()
    if isinstance(node, ast.Attribute):
        return node.attr.lower()
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value.lower()
    return ""


def meanings(word: str) -> set[str]:
    """The words in a name, and the whole of it, with one word for those that mean the same."""
    parts = {word.strip("_"), *word.strip("_").split("_")}
    return {WORDS.get(part, part) for part in parts if len(part) > 1 and not re.fullmatch("[0-9]+", part)}


def given(call: ast.Call, names: list[str]) -> list[tuple[str, str]]:
    """Parameters and the names of the values that a call gives them."""
    pairs = []
    if not any(isinstance(a, ast.Starred) for a in call.args):
        pairs += [(name, word_of(value)) for name, value in zip(names, call.args, strict=False)]
    return [*pairs, *((k.arg, word_of(k.value)) for k in call.keywords if k.arg)]


def crossed(pairs: list[tuple[str, str]]) -> tuple[str, str] | None:
    """Two parameters each of which gets a value with the other one's name."""
    known = [(WORDS.get(p.lower(), p.lower()), meanings(word), p) for p, word in pairs if len(p) > 1 and word]
    for i, (one, of_one, first) in enumerate(known):
        for other, of_other, second in known[i + 1 :]:
            is_crossed = other in of_one and one in of_other and one not in of_one and other not in of_other
            if is_crossed and re.sub(r"[0-9]", "", one) != re.sub(r"[0-9]", "", other):
                return first, second
    return None


@check("exchanged-arguments", "likely", at="probe")
def exchanged_names(seen: Evidence) -> Lines:
    """Two arguments of a call have each other's name, and no call beside it has them in order."""
    for code in code_of(seen):
        calls = [node for node in ast.walk(code.tree) if isinstance(node, ast.Call)]
        if SYMMETRIC.search(code.name.lower()):
            continue
        for call in calls:
            name = called_name(call)
            if len(call.args) + len(call.keywords) < 2 or SYMMETRIC.search(name.lower()):
                continue
            pair = crossed(given(call, parameters_of(callable_of(call, code)) if call.args else []))
            words = [word_of(part) for part in call.args[:2]]
            others = [
                c for c in calls if c is not call
                and (ast.unparse(c.func) == ast.unparse(call.func) or words[::-1] == [word_of(p) for p in c.args[:2]])
            ]  # fmt: skip
            if pair and any(LESS_IS_BETTER.search(word_of(v)) for v in (*call.args, *(k.value for k in call.keywords))):
                continue  # energies of positives are low
            if pair and not others:  # else a loss of both orders
                line = code.line + call.lineno - 1
                text = " ".join(ast.unparse(call).split())[:80]
                yield Line(
                    f"`{text}` ({code.name}, line {line}) gives {pair[0]} what is named as {pair[1]}, and the reverse; "
                    "exchange them",
                    None if any({WORDS.get(p.lower(), p.lower()) for p in pair} == o for o in OPPOSITES) else "note",
                    subject=f"{code.name}:{line}",
                )


@check("exchanged-arguments", "likely", at="probe")
def exchanged_statistics(seen: Evidence) -> Lines:
    """What is named as a deviation is subtracted, and the result is divided by what is named as a mean."""
    for code in code_of(seen):
        for node in ast.walk(code.tree):
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
                continue
            above, below = node.left, node.right
            below = below.left if isinstance(below, ast.BinOp) and isinstance(below.op, ast.Add) else below
            if not isinstance(above, ast.BinOp) or not isinstance(above.op, ast.Sub):
                continue
            one, other = meanings(word_of(above.right)), meanings(word_of(below))
            if "std" in one and "mean" in other and not {"mean"} & one and not {"std"} & other:
                line = code.line + node.lineno - 1
                yield Line(
                    f"`{' '.join(ast.unparse(node).split())[:80]}` ({code.name}, line {line}) subtracts the deviation, "
                    "and divides by the mean; exchange them",
                    subject=f"{code.name}:{line}",
                )


def keys_of(batch: Any) -> set[str]:
    """The names of the parts of a batch that is a mapping, or a graph of PyTorch Geometric; empty for others."""
    return {*map(str, batch.keys())} if callable(getattr(batch, "keys", None)) else set()


def parts_of(batch: Any) -> list[Any]:
    """What a batch that is a sequence or a mapping consists of."""
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return [*parts]


@check("mismatched-keys", "likely", at="probe")
def other_key(seen: Evidence) -> Lines:
    """A call gets two dictionaries' values of different keys, where calls beside it have the same key of both."""
    batches = [*seen.probe.batches.values()] if seen.probe is not None else []
    known = set[str]().union(*map(keys_of, batches))
    inner = [keys for batch in batches for keys in map(keys_of, parts_of(batch)) if keys]
    for code in code_of(seen):
        pairs: dict[tuple[str, str, str], list[tuple[ast.Call, str, str]]] = {}
        for call in (node for node in ast.walk(code.tree) if isinstance(node, ast.Call) and len(node.args) > 1):
            one, other = call.args[:2]
            if isinstance(one, ast.Subscript) and isinstance(other, ast.Subscript) and word_of(one) and word_of(other):
                owners = ast.unparse(one.value), ast.unparse(other.value)
                pairs.setdefault((ast.unparse(call.func), *owners), []).append((call, word_of(one), word_of(other)))
        for (_, first, second), found in pairs.items():
            twins = {key for _, key, other in found if key == other}
            crossed = [(call, a, b) for call, a, b in found if a != b]
            if first == second or len(crossed) != 1 or not twins or len(found) > len(twins) + 1:
                continue
            call, a, b = crossed[0]
            holders = [keys for keys in inner if b in keys]  # mappings of the batch, which may be the second one
            is_there = a in known if second in BATCHES else not holders or any(a in keys for keys in holders)
            if b in twins and a not in twins and is_there:
                line = code.line + call.lineno - 1
                yield Line(
                    f"`{' '.join(ast.unparse(call).split())[:80]}` ({code.name}, line {line}) compares {a!r} with "
                    f"{b!r}, which another call compares with {b!r}; write {second}[{a!r}]",
                    subject=f"{code.name}:{line}",
                )


@check("training-mask", "likely", at="probe")
def other_split(seen: Evidence) -> Lines:
    """A validation reads a mask or indices named as those of training, and not those of its own beside them."""
    probe = seen.probe
    known = keys_of(probe.batches.get("validation_step")) if probe is not None else set()
    for cls in own_classes(type(seen.module)):
        for name in ("validation_step", "test_step"):
            function = vars(cls).get(name)
            tree = tree_of(function) if is_function(function) else None
            words = (
                {*map(word_of, (n for n in ast.walk(tree) if isinstance(n, ast.expr)))} if tree is not None else set()
            )
            read = sorted(word for word in words if OF_TRAINING.fullmatch(word))
            own = {word.replace("train", "val") for word in read} | {word.replace("train", "test") for word in read}
            texts = {str(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant)} if tree is not None else set()
            names = words | (texts & {"val", "valid", "validation", "test"})
            if read and own & known and not any(re.match("val|test", name) for name in names):
                yield Line(
                    f"{name} reads {read[0]}, which by its name is of training, and not {min(own & known)}, so that it "
                    "rates what was trained",
                    subject=name,
                )


@check("deviation", "likely", at="probe")
def deviation_by_name(seen: Evidence) -> Lines:
    """gaussian_nll_loss gets as its variance what is named as a deviation, or Normal as its deviation a variance."""
    found = [*code_of(seen)]
    for code in found:
        for call in (node for node in ast.walk(code.tree) if isinstance(node, ast.Call)):
            layer = callable_of(call, code)
            is_layer = isinstance(getattr(layer, "__self__", None), nn.GaussianNLLLoss)
            name = "gaussian_nll_loss" if is_layer else called_name(call)
            known = (None, torch.distributions.Normal, nn.functional.gaussian_nll_loss)
            if (name not in LIKELIHOODS and name != "Normal") or not (is_layer or layer in known):
                continue
            place, key = (2, "var") if name in LIKELIHOODS else (1, "scale")
            value = next((k.value for k in call.keywords if k.arg == key), None)
            value = value or (call.args[place] if len(call.args) > place else None)
            word, own = word_of(value) if value is not None else "", ast.unparse(code.tree)
            text = "\n".join(ast.unparse(other.tree) for other in found if other.owner is code.owner)
            words, line = {word, *word.split("_")} if word else set(), code.line + call.lineno - 1
            if word and any(SQUARED.search(value) for value in re.findall(rf"\b{re.escape(word)} = (.*)", own)):
                continue  # it was one before
            if name in LIKELIHOODS and words & DEVIATIONS and not words & VARIANCES and _is_deviation(word, text):
                yield Line(
                    f"gaussian_nll_loss takes {word} ({code.name}, line {line}) for the variance; pass {word} ** 2",
                    subject=code.name,
                )
            elif name == "Normal" and words & VARIANCES and not words & DEVIATIONS:
                is_log = bool({"log", "logvar", "logstd"} & words)
                yield Line(
                    f"Normal takes {word} ({code.name}, line {line}) for the deviation; pass "
                    + (f"(0.5 * {word}).exp()" if is_log else f"{word}.sqrt()"),
                    subject=code.name,
                )


def _is_deviation(word: str, text: str) -> bool:
    """Whether a name says that it is one, or code uses it so; some call the variance sigma."""
    name = rf"(\w+\.)*{re.escape(word)}\b"
    uses = (
        rf"Normal\([^()]*{name}|{name} \*\* 2|{name} \* torch\.randn|[123]\.[0-9]+ \* {name}(?![\w.(])|{name}\.square\("
    )
    return "sigma" not in word.split("_") or bool(re.search(uses, text))


@check("last-batch", "likely", at="probe")
def last_batch(seen: Evidence) -> Lines:
    """What the end of a validation logs is computed of an attribute that each of several batches assigns anew."""
    counts = seen.trainer.num_val_batches
    if max((int(n) for n in (counts if isinstance(counts, list) else [counts]) if n != float("inf")), default=0) < 2:
        return
    methods: dict[str, Any] = {}
    for cls in reversed(own_classes(type(seen.module))):
        methods |= {name: value for name, value in vars(cls).items() if is_function(value)}
    for step, end in EPOCH_ENDS.items():
        one, other = (tree_of(methods[name]) if name in methods else None for name in (step, end))
        if one is None or other is None:
            continue
        for name in _assigned_anew(one):
            if not OF_ONE.search(name) and _is_logged(other, name) and _is_of_batch(one, name, seen.module):
                yield Line(
                    f"{end} logs what is computed of self.{name}, which each batch assigns anew, so it is of the last "
                    "batch only; append to a list, or use a metric of torchmetrics",
                    subject=f"{step}:{name}",
                )
                break


def _assigned_anew(tree: ast.FunctionDef) -> Iterator[str]:
    """Attributes that a function always assigns, of values that do not read them."""
    for statement in tree.body:
        if not isinstance(statement, ast.Assign):
            continue
        targets = [t for target in statement.targets for t in ast.walk(target)]
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                reads = (n.attr for n in ast.walk(statement.value) if isinstance(n, ast.Attribute))
                if target.attr not in reads:
                    yield target.attr


def _is_of_batch(tree: ast.FunctionDef, attribute: str, owner: nn.Module) -> bool:
    """Whether a function computes an attribute of its arguments, and of nothing that keeps what was before."""
    text = ast.unparse(tree)
    if len(tree.args.args) < 2 or len(re.findall(rf"self\.{attribute}\b", text)) > 1 or ".compute(" in text:
        return False  # it reads what was before
    known, kept = {tree.args.args[1].arg}, set[str]()
    for node in (n for n in tree.body if isinstance(n, ast.Assign)):
        parts = [*ast.walk(node.value)]
        reads = {n.id for n in parts if isinstance(n, ast.Name)}
        own = {n.attr for n in parts if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"} - {attribute}
        has_state = any(re.search(rf"self\.{n} [-+*/]?= ", text) or _keeps(member_of(owner, n)) for n in own)
        targets = [t for target in node.targets for t in ast.walk(target)]
        if reads & kept or has_state:
            kept |= {t.id for t in targets if isinstance(t, ast.Name)}
        if any(isinstance(t, ast.Attribute) and t.attr == attribute for t in targets):
            is_size = re.search(r"\.(shape|size)\b|\blen\(", ast.unparse(node.value))
            return bool(reads & known) and not reads & kept and not is_size and not has_state
        if reads & known:
            known |= {t.id for t in targets if isinstance(t, ast.Name)}
    return False


def _keeps(value: Any) -> bool:
    """Whether a member of a module may keep something between batches: no layer, number, or method that does not."""
    if isinstance(value, int | float | str) or (isinstance(value, nn.Module) and not is_metric(value)):
        return False
    function = getattr(value, "__func__", None)
    tree = tree_of(function) if is_function(function) else None
    return tree is None or bool(
        re.search(r"self\.[\w.]+ ([-+*/]?)= |\.(append|extend|update|add)\(", ast.unparse(tree))
    )


def _is_logged(tree: ast.FunctionDef, attribute: str) -> bool:
    """Whether a function logs a value that it computes of an attribute."""
    known = {f"self.{attribute}"}

    def reads(node: ast.AST) -> bool:
        parts = (ast.unparse(n) for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute))
        return any(part in known for part in parts)

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and reads(node.value):
            known |= {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("self.log", "self.log_dict")
        and any(reads(a) for a in node.args[-1:])
        for node in ast.walk(tree)
    )


@check("unused-part", "likely", at="probe")
def passed_and_unread(seen: Evidence) -> Lines:
    """A part of the batch that no operation reads is passed to a function of the user's own that does not read it."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches:
        return
    unread = {*probe.base("training_step").unread}
    if depends_on_padding(probe, probe.scored) is False:  # the module knows by their number what is padding
        unread = {name for name in unread if not PADDED.search(name)}
    unread = {name for name in unread if not _has_twin(probe.batches["training_step"], name)}
    for code in code_of(seen) if unread else ():
        for call in (node for node in ast.walk(code.tree) if isinstance(node, ast.Call)):
            function = callable_of(call, code)
            function = getattr(function, "__func__", function)
            tree = tree_of(function) if is_function(function) else None
            if tree is None or _is_one_of_several(function):
                continue
            names = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)]
            names = names[1:] if names[:1] == ["self"] else names
            values = [*zip(names, call.args, strict=False), *((k.arg or "", k.value) for k in call.keywords)]
            read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
            for parameter, value in values:
                word = word_of(value)
                is_unread = parameter not in read and not {"locals", "vars"} & read
                if is_unread and not LABELS.fullmatch(parameter) and word in {name.lower() for name in unread}:
                    yield Line(
                        f"{tree.name} gets {word} of the batch ({code.name}, line {code.line + call.lineno - 1}), and "
                        "never reads it; use it there, or do not pass it",
                        subject=word,
                    )


def _has_twin(batch: Any, name: str) -> bool:
    """Whether another part of a batch has the same numbers, but for those of padding that a loss ignores."""
    parts = {k: t for k, t in batch.items() if isinstance(t, Tensor)} if isinstance(batch, Mapping) else {}
    if (one := parts.pop(name, None)) is None:
        return False
    others = [(t >= 0, t == one) for t in parts.values() if t.shape == one.shape]
    return any(bool(known.any()) and bool(same[known].all()) for known, same in others)


def _is_one_of_several(function: types.FunctionType) -> bool:
    """Whether other classes of the file have a method of its name and parameters, which may take its place."""
    code, name = function.__code__, function.__name__
    parameters = code.co_varnames[: code.co_argcount]
    members = [vars(c).get(name) for c in function.__globals__.values() if isinstance(c, type)]
    twins = {m.__code__ for m in members if is_function(m) and m.__module__ == function.__module__}
    return any(t is not code and t.co_varnames[: t.co_argcount] == parameters for t in twins)


@check("shared-state", "certain", at="probe")
def shared_state(seen: Evidence) -> Lines:
    """What state_dict() returns is kept in an attribute as it is, and loaded again by the same network."""
    found = [*code_of(seen)]
    loads = [
        (code, call.func.value, call.args[0])
        for code in found
        for call in ast.walk(code.tree)
        if isinstance(call, ast.Call) and called_name(call) == "load_state_dict" and call.args
        and isinstance(call.func, ast.Attribute)
    ]  # fmt: skip
    for code in found:
        for node in (n for n in ast.walk(code.tree) if isinstance(n, ast.Assign)):
            target, call = ast.unparse(node.targets[0]), _without_container(node.value)
            is_state = isinstance(call, ast.Call) and called_name(call) == "state_dict" and target.startswith("self.")
            owner = call.func.value if is_state and isinstance(call.func, ast.Attribute) else None  # type: ignore[attr-defined]
            if owner is None or not _is_network(code, owner, seen):
                continue
            is_loaded = any(
                other.owner is code.owner
                and ast.unparse(network) == ast.unparse(owner)
                and ast.unparse(given) == target
                for other, network, given in loads
            )
            own = "\n".join(ast.unparse(other.tree) for other in found if other.owner is code.owner)
            values = re.findall(rf"{re.escape(target)}(?:\[.*\])? = (.*)", own)
            is_only = not any(re.search(rf"clone|copy|load\(|{re.escape(target)}\b", value) for value in values)
            if is_loaded and is_only:
                line = code.line + node.lineno - 1
                yield Line(
                    f"{target} ({code.name}, line {line}) is no copy: state_dict() returns the weights themselves, "
                    "which go on to change; write copy.deepcopy(….state_dict())",
                    subject=target,
                )


def _without_container(value: ast.expr) -> ast.expr:
    """What dict() or OrderedDict() of a call is made of, or a dictionary of its items: neither copies a value."""
    if isinstance(value, ast.Call) and called_name(value) in ("dict", "OrderedDict") and len(value.args) == 1:
        return value.args[0]
    if isinstance(value, ast.DictComp) and isinstance(value.value, ast.Name) and len(value.generators) == 1:
        items = value.generators[0].iter
        is_items = isinstance(items, ast.Call) and called_name(items) == "items"
        if is_items and isinstance(items, ast.Call) and isinstance(items.func, ast.Attribute):
            return items.func.value
    return value


def _is_network(code: Code, owner: ast.expr, seen: Evidence) -> bool:
    """Whether a value is a layer, whose state_dict is that of torch."""
    first, *path = ast.unparse(owner).split(".")
    found = {"self": code.owner, "pl_module": seen.module}.get(first)
    for name in path:
        found = member_of(found, name)
    return isinstance(found, nn.Module) and not is_metric(found) and type(found).state_dict is nn.Module.state_dict


@check("shared-augmentation", "likely", at="probe")
def transform_of_both(seen: Evidence) -> Lines:
    """Code sets an attribute of the dataset of one of two subsets, or another value of each, but it is one dataset."""
    subsets = [seen.splits.dataset(name) for name in ("train", "validation")] if seen.splits else []
    shared = [s.dataset for s in subsets if isinstance(s, Subset)]
    if len(shared) < 2 or shared[0] is not shared[1]:
        return
    for code in code_of(seen):
        values: dict[str, dict[str, str]] = {}
        for node in code.tree.body:  # and not in branches
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            holder = target.value if isinstance(target, ast.Attribute) else None
            if isinstance(node, ast.Assign) and isinstance(holder, ast.Attribute) and holder.attr == "dataset":
                attribute = ast.unparse(node.targets[0]).rpartition(".")[2]
                values.setdefault(attribute, {})[ast.unparse(holder.value)] = ast.unparse(node.value)
        for attribute, given in values.items():
            (one, value), *_ = given.items()
            if hasattr(shared[0], attribute) and [*given.values()] == ["None"] and TRANSFORMS.search(attribute):
                yield (
                    f"{code.name} sets {attribute} of {one}.dataset to {value[:40]}, but that is the dataset of both "
                    "splits, so both have it; give each split a dataset of its own"
                )
                return
            if hasattr(shared[0], attribute) and len({*given.values()}) > 1:
                one, *_, other = given
                yield (
                    f"{code.name} sets {attribute} of {one}.dataset and of {other}.dataset, which are the same one, so "
                    f"both have {given[other]}; give each split a dataset of its own"
                )
                return


@check("worker-copies", "likely", at="probe")
def worker_copies(seen: Evidence) -> Lines:
    """Code that runs in each epoch sets an attribute of the dataset, of which persistent workers have copies."""
    loader = seen.splits.train if seen.splits else None
    if not getattr(loader, "persistent_workers", False) or not getattr(loader, "num_workers", 0):
        return
    if any(
        re.search(r"multiprocessing|sharedctypes", type(v).__module__) or (isinstance(v, Tensor) and v.is_shared())  # type: ignore[no-untyped-call]
        for v in vars(getattr(loader, "dataset", loader)).values()
    ):
        return  # which workers see
    for code in code_of(seen):
        for node in ast.walk(code.tree) if EACH_EPOCH.search(code.name) else ():
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.Call) and called_name(node).startswith("set_"):
                targets = [node.func]
            for target in targets:
                holder, _, attribute = ast.unparse(target).rpartition(".")
                if re.search(r"(^|[._])dataset$", holder) and hasattr(getattr(loader, "dataset", None), attribute):
                    yield (
                        f"{code.name} changes {ast.unparse(target)[:60]} in each epoch, but workers with "
                        "persistent_workers=True keep the copies that they began with; set persistent_workers=False, "
                        "or share the value"
                    )
                    return
