"""What the source of the user's classes says: values that are dropped, and hooks of another name. For probes only."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import sys
import types
from collections.abc import Iterator, Sequence

import lightning as L
import torch
from torch import Tensor, nn

from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.data import is_shuffled
from boltcutter.diagnosis.evidence import WITH_WEIGHTS, Evidence
from boltcutter.diagnosis.graph import LOSSES, nodes_behind
from boltcutter.diagnosis.layers import DROPOUTS, LARGE, fan_of, is_initial
from boltcutter.diagnosis.source import (
    Place,
    callback_classes,
    codes,
    codes_of,
    functions_of,
    is_function,
    own_classes,
    own_names,
    says,
    tree_of,
)
from boltcutter.internals import NormWithStatistics
from boltcutter.structure import flatten

# Methods of tensors that change nothing: their results are all that they do.
PURE = frozenset(
    (
        *("masked_fill", "masked_scatter", "detach", "clone", "clamp", "clip", "unsqueeze", "squeeze", "view"),
        *("reshape", "permute", "transpose", "flatten", "movedim", "softmax", "log_softmax", "sigmoid", "relu", "tanh"),
        *("exp", "sqrt", "abs", "pow", "mean", "sum", "contiguous", "expand", "scatter", "index_fill", "where"),
        *("tril", "triu", "nan_to_num", "clamp_min", "clamp_max", "roll", "flip"),
    )
)
FUNCTIONS = PURE | {
    "normalize",
    "cat",
    "stack",
    "log",
    "dropout",
    "pad",
    "relu",
    "gelu",
    "layer_norm",
    "add",
    "mul",
    "sub",
    "div",
}
ACTIONS = frozenset(("eval", "train", "backward", "step", "zero_grad", "reset", "freeze", "unfreeze"))
STATELESS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
    *(nn.Softmax, nn.LogSoftmax, nn.LayerNorm, nn.GroupNorm, nn.LeakyReLU, nn.ELU, nn.Softplus),
)
MATTERS = re.compile(r"(^|_)(masks?|masked|pads?|padding|noisy|noised|positions?|pos|pe|penalty|kl|kld|augmented)($|_)")
READS = frozenset(("size", "dim", "len", "numel", "item", "get", "pop", "int", "float", "str", "list", "dict", "range"))
OLDER = re.compile(r"(?=.*(^|_)(old|behaviou?r)(_|$))(?=.*(logp|log_?prob|logits|lp|logpi|pi))")
REMOVED = ("test_epoch_end",)  # hooks of Lightning 1, at which Lightning itself stops a test
KEPT = 6  # steps
TOTAL = re.compile(r"(^|_)(loss|objective)$")
SCOPES = frozenset(("locals", "eval", "exec", "vars"))
ORDERED = {
    "clip_grad_norm_": "clip",
    "clip_grad_value_": "clip",
    "clip_gradients": "clip",
    "backward": "backward",
    "manual_backward": "backward",
    "step": "step",
}
# Hooks of automatic optimization in which no gradient is that of the step that follows.
WITHIN = re.compile("on_train_batch|on_train_epoch_start|on_before|on_after_backward|on_train_start")
BESIDE = frozenset(("training_step", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"))
SIMPLE = (ast.Assign, ast.AugAssign, ast.Return, ast.Expr)
HOOKS = re.compile(r"(on_|train(ing)?_|valid(ation)?_|val_|test_|predict_|configure_|optimizer_|lr_scheduler_)")
ALIKE = 0.88  # of two names


@check("no-effect", "certain", at="probe")
def no_effect(seen: Evidence) -> Lines:
    """A statement of the module's code computes a value, and does nothing else."""
    for place in functions_of(seen.module):
        for node in ast.walk(place.tree):
            problem = ""
            if isinstance(node, ast.Expr):
                problem = _dropped(node.value, place.owner)
            elif isinstance(node, ast.Assign) and _is_plus(node.value) and _is_set_before(node, place.tree):
                problem = "assigns, and adds nothing; write +="
            if problem:
                text = " ".join(ast.unparse(node).split())[:80]
                line = place.line + node.lineno - 1  # type: ignore[attr-defined]
                yield Line(f"`{text}` ({place.name}, line {line}) {problem}", subject=f"{place.name}:{line}")


def _is_plus(value: ast.expr) -> bool:
    while isinstance(value, ast.BinOp):  # the leftmost term
        value = value.left
    return isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.UAdd)


def _is_set_before(node: ast.Assign, tree: ast.FunctionDef) -> bool:
    """Whether a statement before it assigns the same name, to which a term could be added; a sign may be written."""
    (target,) = node.targets if len(node.targets) == 1 else (None,)
    if isinstance(target, ast.Attribute):
        return not isinstance(node.value, ast.UnaryOp) or not isinstance(node.value.operand, ast.Constant)
    earlier = (n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return isinstance(target, ast.Name) and any(n.id == target.id and n.lineno < node.lineno for n in earlier)


def _is_other_object(receiver: str, owner: nn.Module) -> bool:
    """Whether self.…, of which a method is called, is no tensor: its method may do more than return a value."""
    first, *names = receiver.split(".")
    found: object = owner
    for name in names:
        found = getattr(found, name, None)
    return first == "self" and found is not None and not isinstance(found, torch.Tensor)


def _scatters(call: ast.Call) -> bool:
    """Whether a call has the arguments of a tensor's method, rather than those of a plot or of a collective."""
    is_number = bool(call.args) and isinstance(call.args[0], ast.Constant | ast.UnaryOp)
    return is_number and (len(call.args) > 2 or any(k.arg in ("src", "value") for k in call.keywords))


def _dropped(value: ast.expr, owner: nn.Module) -> str:
    """What is wrong with a statement that is an expression."""
    if isinstance(value, ast.BinOp) and not isinstance(value.op, ast.LShift | ast.RShift | ast.BitOr):
        return "computes a value that is dropped; assign it"
    if isinstance(value, ast.Compare | ast.UnaryOp):
        return "computes a value that is dropped; assign it"
    if isinstance(value, ast.Attribute) and value.attr in ACTIONS:
        return f"names {value.attr}, and does not call it; add ()"
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return ""
    name, receiver = value.func.attr, ast.unparse(value.func.value)
    if any(k.arg in ("inplace", "out") for k in value.keywords):
        return ""
    if receiver in ("F", "torch", "nn.functional", "torch.nn.functional", "functional"):
        is_dropped = name in FUNCTIONS
    elif receiver == "self":
        layer = owner._modules.get(name)
        is_dropped = isinstance(layer, STATELESS) and not getattr(layer, "inplace", False) and not layer._forward_hooks
    else:
        is_tensor = not isinstance(value.func.value, ast.Constant) and not _is_other_object(receiver, owner)
        is_dropped = name in PURE and is_tensor and (name != "scatter" or _scatters(value))
    return "returns a new tensor, which is dropped; assign it" if is_dropped else ""


@check("eval-in-training", "likely", at="probe")
def eval_in_callback(seen: Evidence) -> Lines:
    """A hook within training, of a callback or the module, calls ``eval()``, and no method there ``train()``."""
    modes = any(isinstance(part, (*DROPOUTS, NormWithStatistics)) for part in seen.module.modules())
    if not modes and not says(seen.module, re.compile("dropout|^training$")):
        return  # evaluation is as training
    for cls in (*callback_classes(seen.trainer), *own_classes(type(seen.module))):
        trees = [(f, tree) for f in vars(cls).values() if is_function(f) and (tree := tree_of(f)) is not None]
        text = "\n".join(ast.unparse(tree) for _, tree in trees)
        for function, tree in trees:
            name = function.__name__
            call = re.search(r"\b(pl_module|self|trainer\.(lightning_module|model))\.eval\(\)", ast.unparse(tree))
            uses = re.search(r"\b(pl_module|self|model|lightning_module)\(", ast.unparse(tree).partition(".eval()")[2])
            after = ast.unparse(tree).partition(".eval()")[2]
            helps = re.search(r"\w\((?:[^()]*, )?pl_module[,)]", after)  # a function may restore the mode
            if (
                WITHIN.match(name)
                and call
                and uses
                and not helps
                and not re.search(r"\.train\(|\.training\b|\bmodes?\b", text)
            ):
                yield (
                    f"{cls.__name__}.{name} puts the module in evaluation mode, and nothing puts it back, so what "
                    "follows is trained without dropout and batch statistics; call pl_module.train() behind it"
                )


NUMBERS = re.compile(r"\.item\(\)|\.detach\(\)|float\(")  # of the loss, as they are logged


@check("divided-twice", "likely", at="probe")
def divided_by_hand(seen: Evidence) -> Lines:
    """training_step returns a loss divided by accumulate_grad_batches, by which Lightning divides it as well."""
    count = seen.trainer.accumulate_grad_batches
    for place in functions_of(seen.module) if count > 1 and seen.module.automatic_optimization else ():
        nodes = [*ast.walk(place.tree)] if place.tree.name == "training_step" else []
        returned = [node.value for node in nodes if isinstance(node, ast.Return)]
        calls = [node for node in nodes if isinstance(node, ast.Call) and called_name(node).startswith("log")]
        logged = [inner for call in calls for inner in ast.walk(call)]
        for node in nodes:
            is_division = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
            of_loss = (is_division and re.search("loss", ast.unparse(node.left))) or node in returned  # type: ignore[attr-defined]
            of_loss = of_loss and not (is_division and NUMBERS.search(ast.unparse(node.left)))  # type: ignore[attr-defined]
            is_whole = is_division and ast.unparse(node.right) == "self.trainer.accumulate_grad_batches"  # type: ignore[attr-defined]
            if is_whole and of_loss and node not in logged:
                yield (
                    f"`{ast.unparse(node)[:80]}` ({place.name}, line {place.line + node.lineno - 1}) divides the loss "  # type: ignore[attr-defined]
                    f"by accumulate_grad_batches={count}, as Lightning does, too, so the gradient is too small; return "
                    "the loss as it is"
                )


def _is_unbounded(call: ast.Call) -> bool:
    """Whether the bound of a clipping is infinite, or a number of 1,000 or more."""
    bounds = (*call.args[1:2], *(k.value for k in call.keywords if k.arg in ("max_norm", "clip_value")))
    numbers = (float(b.value) for b in bounds if isinstance(b, ast.Constant) and isinstance(b.value, int | float))
    return re.search(r"\binf\b", ast.unparse(call)) is not None or any(number >= 1000 for number in numbers)


@check("clipped-too-early", "likely", at="probe")
def clipped_too_early(seen: Evidence) -> Lines:
    """A function clips gradients before its first backward pass, or after its last step, and not between them."""
    automatic = seen.module.automatic_optimization and seen.trainer.accumulate_grad_batches == 1
    for place in functions_of(seen.module):
        calls = [node for node in ast.walk(place.tree) if isinstance(node, ast.Call)]
        called = [(call.lineno, name) for call in calls if (name := called_name(call)) in ORDERED]
        if any(_is_unbounded(call) for call in calls if ORDERED.get(called_name(call)) == "clip"):
            continue  # it measures their norm
        lines = {name: [line for line, each in called if ORDERED[each] == name] for name in ORDERED.values()}
        if automatic and lines["clip"] and not lines["backward"] and place.tree.name in BESIDE:
            yield Line(
                f"{place.name} clips gradients (line {place.line + lines['clip'][0] - 1}), but Lightning computes "
                "those of the step after training_step, and uses them before on_train_batch_end; pass "
                "gradient_clip_val to the trainer",
                subject=place.name,
            )
        if not all(lines.values()):
            continue
        clip, backward, step = lines["clip"], lines["backward"], lines["step"]
        line = place.line + clip[0] - 1
        if max(clip) < min(backward) and max(backward) < min(step):
            yield Line(
                f"{place.name} clips gradients (line {line}) before they are computed, so those of the step are not "
                "clipped; clip between backward and step",
                subject=place.name,
            )
        elif max(backward) < min(step) and max(step) < min(clip):
            yield Line(
                f"{place.name} clips gradients (line {line}) after the step that they are for, so it is not clipped; "
                "clip between backward and step",
                subject=place.name,
            )


def called_name(call: ast.Call) -> str:
    """The last name of the function that a call is of."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


@check("same-addend", "likely", at="probe")
def added_to_itself(seen: Evidence) -> Lines:
    """A method adds what its layers have computed to itself, as the name of its input has been assigned anew."""
    for place in functions_of(seen.module):
        last = inspect.getattr_static(type(place.owner), place.tree.name, None)
        if not f".{getattr(last, '__qualname__', '')}".endswith(f".{place.name}"):
            continue  # a subclass has another one
        numbers: dict[str, int] = {}  # of each name, the statement that has computed its value by a layer
        for i, statement in enumerate(place.tree.body):
            for node in ast.walk(statement) if isinstance(statement, SIMPLE) else ():
                names = _added(node)
                if len(names) == 2 and len({numbers.get(n, -1 - j) for j, n in enumerate(names)}) == 1:
                    line = place.line + node.lineno - 1  # type: ignore[attr-defined]
                    yield Line(
                        f"`{' '.join(ast.unparse(node).split())[:80]}` ({place.name}, line {line}) adds a value to "
                        "itself, as its input was overwritten before, so nothing skips the layers; give their result "
                        "a name of its own",
                        subject=f"{place.name}:{line}",
                    )
                    return
            value = statement.value if isinstance(statement, ast.Assign) else None
            is_layer = value is not None and any(_is_layer(n, place.owner) for n in ast.walk(value))
            number = numbers.get(value.id) if isinstance(value, ast.Name) else i if is_layer else None
            for n in ast.walk(statement):
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
                    numbers.pop(n.id, None)
                    is_one = isinstance(statement, ast.Assign) and any(n is t for t in statement.targets)
                    if is_one and number is not None:
                        numbers[n.id] = number


def _added(node: ast.AST) -> list[str]:
    """The two names that a node adds; else fewer."""
    sides: tuple[ast.AST, ...] = ()
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = node.left, node.right
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        sides = node.target, node.value
    elif isinstance(node, ast.Call) and called_name(node) == "add" and len(node.args) == 2:
        sides = node.args[0], node.args[1]
    return [n.id for n in sides if isinstance(n, ast.Name)]


def _is_layer(node: ast.AST, owner: nn.Module) -> bool:
    """Whether a node calls a layer of the module: self.layer(…)."""
    path = _path(node.func) if isinstance(node, ast.Call) else None
    found: object = owner if path else None
    for name in (path or "").split("."):
        found = getattr(found, name, None)
    return isinstance(found, nn.Module)


@check("overwritten-loss", "likely", at="probe")
def overwritten_loss(seen: Evidence) -> Lines:
    """A loop assigns a loss in each round, reads it in none, and the function returns that of the last one."""
    for place in functions_of(seen.module):
        for loop in (n for n in ast.walk(place.tree) if isinstance(n, ast.For)):
            inside = {n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            is_left = any(isinstance(n, ast.Break | ast.Return | ast.If) for n in ast.walk(loop))
            for node in loop.body if not is_left and not inside & SCOPES else ():
                name = getattr(node.targets[0], "id", "") if isinstance(node, ast.Assign) else ""
                if TOTAL.search(name) and name not in inside and _is_trained(seen, place.tree, name, after=loop):
                    line = place.line + node.lineno - 1
                    yield Line(
                        f"{name} is assigned anew in each round of a loop ({place.name}, line {line}), so only that of "
                        "the last round is trained; write +=",
                        "note" if _goes_on(loop, node) else None,  # as of refined weights
                        subject=f"{place.name}:{line}",
                    )


def _goes_on(loop: ast.For, loss: ast.stmt) -> bool:
    """Whether a loss depends on a state that a loop carries from round to round."""
    stored = {n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    stored -= {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    assigned, carried = set[str](), set[str]()
    for statement in loop.body:
        names = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
        carried |= {n.id for n in names if isinstance(n.ctx, ast.Load) and n.id in stored - assigned}
        assigned |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
    read = {n.id for n in ast.walk(loss) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    for statement in reversed(loop.body):
        names = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
        if read & {n.id for n in names if isinstance(n.ctx, ast.Store)}:
            read |= {n.id for n in names if isinstance(n.ctx, ast.Load)}
    return bool(carried & read)


def _is_trained(seen: Evidence, tree: ast.FunctionDef, name: str, *, after: ast.For) -> bool:
    """Whether a backward pass begins at a name behind a loop, or a function returns it, which Lightning may train."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call | ast.Return):
            continue
        is_return = isinstance(node, ast.Return) and seen.module.automatic_optimization
        if is_return or (isinstance(node, ast.Call) and called_name(node) in ("backward", "manual_backward")):
            found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            if name in found and node.lineno > (after.end_lineno or 0):
                return True
    return False


@check("untied", "likely", at="probe")
def untied(seen: Evidence) -> Lines:
    """__init__ assigns the parameter of one layer to another one, and they are two parameters of equal shape now."""
    for place in functions_of(seen.module):
        # That of a subclass may replace a layer.
        is_last = f".{type(place.owner).__init__.__qualname__}".endswith(f".{place.name}")
        for node in place.tree.body if is_last and place.tree.name == "__init__" else ():  # not in a branch
            if not isinstance(node, ast.Assign) or len(node.targets) != 1:
                continue
            target, value = (ast.unparse(each) for each in (node.targets[0], node.value))
            one, other = (_parameter(place.owner, text) for text in (target, value))
            if one is not None and other is not None and one is not other and one.shape == other.shape:
                yield Line(
                    f"`{target} = {value}` ({place.name}, line {place.line + node.lineno - 1}) ties two layers, but "
                    "one of them has got another parameter since, so they are trained apart; initialize parameters "
                    "in place, and tie them at the end",
                    subject=target,
                )


def _parameter(owner: nn.Module, text: str) -> nn.Parameter | None:
    """The parameter that self.… names; None if it is something else."""
    first, _, path = text.partition(".")
    found: object = owner
    for name in path.split("."):
        found = getattr(found, name, None) if first == "self" else None
    return found if isinstance(found, nn.Parameter) else None


@check("unused-value", "likely", at="probe")
def unused_value(seen: Evidence) -> Lines:
    """A mask, noise or term of the loss, or a layer made by __init__, is assigned to a name that nothing reads."""
    for place in functions_of(seen.module):
        nodes = [*ast.walk(place.tree)]
        read = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        if read & SCOPES:
            continue
        read |= {n.target.id for n in nodes if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)}
        read |= {name for n in nodes if isinstance(n, ast.Global | ast.Nonlocal) for name in n.names}
        for node in nodes:
            if not isinstance(node, ast.Assign) or len(node.targets) != 1:
                continue
            target = node.targets[0]
            has_ratio = re.search(r"\bexp\(|\.exp\(|clamp\(|clip\(", ast.unparse(place.tree))
            older = _older(target, node.value, read) if has_ratio else ""
            name = target.id if isinstance(target, ast.Name) else older
            if name not in read and (not isinstance(target, ast.Name) or _matters(name, node.value, place)) and name:
                line = place.line + node.lineno - 1
                yield Line(
                    f"{name} is computed by {place.name} (line {line}), and never used; pass it on, or remove it",
                    subject=f"{place.name}:{name}",
                )


@check("no-effect", "likely", at="probe")
def rebinds_in_a_loop(seen: Evidence) -> Lines:
    """A loop gives its variable a value computed from it, as p = 0.9 * p, which nothing reads before the next one."""
    for place in functions_of(seen.module):
        for loop in (n for n in ast.walk(place.tree) if isinstance(n, ast.For)):
            variables = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
            for node in loop.body:
                if not (name := _given_anew(node, variables)):
                    continue
                if not any(_reads(n, name) and n.lineno > (node.end_lineno or 0) for n in _names(place.tree)):
                    line = place.line + node.lineno - 1
                    yield Line(
                        f"{place.name} assigns {name} in a loop (line {line}), which gives this name another value, "
                        "and changes nothing of what the loop goes over; write into it, as by copy_(), mul_() or "
                        "lerp_(), or by its index",
                        subject=f"{place.name}:{name}",
                    )


def _given_anew(node: ast.stmt, variables: set[str]) -> str:
    """The one of the names to which a statement assigns a value computed from itself."""
    target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
    if not isinstance(target, ast.Name) or target.id not in variables or not isinstance(node, ast.Assign):
        return ""
    return target.id if any(_reads(each, target.id) for each in _names(node.value)) else ""


def _names(tree: ast.AST) -> Iterator[ast.Name]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Name))


def _reads(name: ast.Name, of: str) -> bool:
    return name.id == of and isinstance(name.ctx, ast.Load)


def _older(target: ast.expr, value: ast.expr, read: set[str]) -> str:
    """The name, in an assignment to several, of what an older policy has returned, which nothing reads; else empty."""
    names = [n.id for n in target.elts if isinstance(n, ast.Name)] if isinstance(target, ast.Tuple) else []
    found = [n for n in names if n not in read and OLDER.search(n)]
    return found[0] if found and isinstance(value, ast.Call) and len(names) > 1 else ""


def _matters(name: str, value: ast.expr, place: Place) -> bool:
    called = value.func if isinstance(value, ast.Call) else None
    if place.name.endswith("__init__"):
        text = ast.unparse(called) if called is not None else ""
        return text.startswith(("nn.", "torch.nn.")) and text.rpartition(".")[2][:1].isupper()
    last = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    is_computed = isinstance(value, ast.Compare | ast.BinOp | ast.UnaryOp) or (called is not None and last not in READS)
    return is_computed and not name.startswith("_") and bool(MATTERS.search(name))


@check("misspelled-hook", "likely", at="probe")
def misspelled_hook(seen: Evidence) -> Lines:
    """A method of the module, its data or a callback that nothing calls has almost the name of a hook of Lightning."""
    data = seen.trainer.datamodule  # type: ignore[attr-defined]
    bases: dict[type, type] = dict.fromkeys(callback_classes(seen.trainer), L.Callback)
    bases |= dict.fromkeys(own_classes(type(data)), L.LightningDataModule)
    bases |= dict.fromkeys(own_classes(type(seen.module)), L.LightningModule)
    called = {name for cls in bases for code in codes(cls) for name in names_in(code)}
    for cls, base in bases.items():
        hooks = {name for name in dir(base) if HOOKS.match(name) or name.endswith("_dataloader")}
        beside = vars(sys.modules.get(cls.__module__, types)).values()
        functions = [v.__code__ for v in beside if isinstance(v, types.FunctionType)]
        used = called | {name for code in (*codes_of(seen.module), *functions) for name in names_in(code)}
        for name, value in vars(cls).items():
            if not isinstance(value, types.FunctionType) or name in hooks or name in used or not HOOKS.match(name):
                continue
            if name in REMOVED or any(name in vars(each) for each in cls.__mro__[1:]):
                continue
            plain = re.sub("valid_|val_", "validation_", name).replace("training_epoch", "train_epoch")
            plain = plain.replace("training_batch", "train_batch").replace("on_training_", "on_train_")
            plain = re.sub("^train_step$", "training_step", plain).replace("_begin", "_start")
            plain = re.sub("^on_(epoch|batch)_", r"on_train_\1_", plain)  # as of Keras, and of Lightning 1
            near = (difflib.get_close_matches(each, hooks, 1, ALIKE) for each in (plain, name))
            close = [plain] if plain in hooks else next(filter(None, near), [])
            if close and not (name.startswith(f"{close[0]}_") and close[0] in vars(cls)):  # one more of its kind
                yield Line(
                    f"nothing calls {cls.__name__}.{name}: Lightning's hook is {close[0]}; rename it", subject=name
                )


def names_in(code: types.CodeType) -> set[object]:
    """Attributes and functions that code names, also in texts."""
    return {*code.co_names, *code.co_consts}


@check("loads-nothing", "likely", at="probe")
def loads_nothing(seen: Evidence) -> Lines:
    """After ``load_state_dict`` in its constructor, all layers of a part still have torch's initial values."""
    for name in sorted(loaded_parts(seen.module)):
        try:
            part = seen.module.get_submodule(name)
        except AttributeError:
            continue
        layers = [m for m in part.modules() if isinstance(m, WITH_WEIGHTS)]
        weights = [(w, fan_of(m, w)) for m in layers for w in m.parameters() if w.ndim > 1]
        if weights and max(w.numel() for w, _ in weights) >= LARGE and all(is_initial(w, n) for w, n in weights):
            yield (
                f"all {len(layers)} layers of {name or type(part).__name__} still have torch's initial values after "
                "load_state_dict(), so none of its keys fits, which strict=False hides; correct their prefix"
            )


def loaded_parts(module: nn.Module) -> set[str]:
    """Parts of a module whose state the constructor of its class always loads, from a file or an argument."""
    found = set[str]()
    for cls in own_classes(type(module)):
        for method in ("__init__", "configure_model"):
            function = vars(cls).get(method)
            tree = tree_of(function) if isinstance(function, types.FunctionType) else None
            if tree is not None and "state_dict" not in {
                node.func.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            }:  # of another part, as of a copy that is averaged
                found |= _loaded_in(tree, _given(cls, tree) if method == "__init__" else ())
    return found


def _given(cls: type, tree: ast.FunctionDef) -> list[ast.stmt]:
    """What a constructor does if an argument is not None, where all calls of its class in the user's files give it."""
    functions = [f for names in own_names() for f in [*names.values()] if isinstance(f, types.FunctionType)]
    own = [f for f in functions if cls.__name__ in f.__code__.co_names or cls.__name__ in f.__globals__]
    trees = [inner for f in dict.fromkeys(own) if (inner := tree_of(f)) is not None]
    nodes = [node for inner in trees for node in ast.walk(inner)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and called_name(node) == cls.__name__]
    names = [a.arg for a in tree.args.args[1:]]
    found: list[ast.stmt] = []
    for statement in (s for s in tree.body if isinstance(s, ast.If)):
        name = ast.unparse(statement.test).removesuffix(" is not None")
        values = [_argument(call, name, names) for call in calls if name in names]
        if values and all(isinstance(v, ast.Call) for v in values):
            found += statement.body
    return found


def _argument(call: ast.Call, name: str, names: list[str]) -> ast.expr | None:
    """What a call gives to a parameter; None if it gives nothing."""
    place = names.index(name)
    named = next((k.value for k in call.keywords if k.arg == name), None)
    return call.args[place] if len(call.args) > place else named


def _loaded_in(tree: ast.FunctionDef, inner: Sequence[ast.stmt] = ()) -> set[str]:
    named: dict[str, str] = {}  # attributes, by the local variable that they are
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            for target in node.targets:
                named[node.value.id] = _path(target) or ""
    found = set()
    for statement in (*tree.body, *inner):
        value = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
            continue
        if value.func.attr == "load_state_dict":
            owner = value.func.value
            is_local = isinstance(owner, ast.Name) and owner.id != "self"
            path = (named.get(owner.id) or None) if is_local else _path(owner)  # type: ignore[attr-defined]
            if path is not None and not _is_whole(value, tree):
                found.add(path)
    return found


def _is_whole(call: ast.Call, tree: ast.FunctionDef) -> bool:
    """Whether what is loaded is an argument as it was given, all keys of which must fit."""
    state = call.args[0] if len(call.args) == 1 and not call.keywords else None
    changed = (n for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load))
    is_given = isinstance(state, ast.Name) and state.id in {a.arg for a in (*tree.args.args, *tree.args.kwonlyargs)}
    return is_given and state.id not in {n.id for n in changed}  # type: ignore[union-attr]


@check("loads-nothing", "likely", at="probe")
def initialized_after_loading(seen: Evidence) -> Lines:
    """A constructor draws new values for all layers of the module after it has loaded or copied a part of them."""
    for cls in {cls: None for part in seen.module.modules() for cls in own_classes(type(part))}:
        function = vars(cls).get("__init__")
        tree = tree_of(function) if isinstance(function, types.FunctionType) else None
        loaded = dict[str, str]()
        for statement in _in_order(tree.body) if tree is not None else ():
            drawn = drawn_again(statement)
            lost = [
                name for name in loaded if drawn is not None and f"{name}.".startswith(f"{drawn}." if drawn else "")
                and _initializes(seen.module, cls, name, statement)
                and not re.search(r"(get|has)attr\(", _applied(cls, statement))  # which may spare it
            ]  # fmt: skip
            if lost:
                line = function.__code__.co_firstlineno + statement.lineno - 1  # type: ignore[union-attr]
                yield (
                    f"{cls.__name__}.__init__ loads {lost[0] or 'the module'} by {loaded[lost[0]]}(), and then draws "
                    f"new values for all its layers (line {line}); initialize first, or only what is new"
                )
                return
            loaded |= dict(loads_of(statement))


def _initializes(module: nn.Module, cls: type, name: str, statement: ast.stmt) -> bool:
    """Whether the function that a statement applies to all layers may set those of a part, by the kinds it names."""
    owner = next(part for part in module.modules() if isinstance(part, cls))
    text = _applied(cls, statement)
    try:
        layers = [layer for layer in owner.get_submodule(name).modules() if layer._parameters]
    except AttributeError:
        return False
    if not re.search(r"isinstance\(|__name__", text):
        return bool(layers)
    return any(re.search(rf"\b{kind.__name__}\b", text) for layer in layers for kind in type(layer).__mro__[:-1])


def _applied(cls: type, statement: ast.stmt) -> str:
    """The source of the function that a statement applies to all layers; empty if it is none of the file."""
    applied = re.search(r"\.apply\((self\.)?(\w+)\)", ast.unparse(statement))
    place = cls if applied and applied[1] else sys.modules[cls.__module__]
    function = getattr(place, applied[2], None) if applied else None
    tree = tree_of(function) if isinstance(function, types.FunctionType) else None
    return ast.unparse(tree) if tree is not None else ""


def _in_order(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those that a condition has behind it, but for those of else."""
    for statement in statements:
        if isinstance(statement, ast.If):
            yield from _in_order(statement.body)
        else:
            yield statement


def loads_of(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """Parts whose weights a statement loads, and by what."""
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.Call):
        return
    name = ast.unparse(value.func).rpartition(".")[2]
    if name == "load_state_dict" and isinstance(value.func, ast.Attribute):
        if (path := _path(value.func.value)) is not None:
            yield path, name
    elif name == "copy_" and isinstance(value.func, ast.Attribute):
        if (path := _path(value.func.value)) is not None:
            yield path.removesuffix(".data").removesuffix(".weight"), name
    elif isinstance(statement, ast.Assign):
        named = {k.arg: k.value for k in value.keywords}
        pretrained, weights = named.get("pretrained"), named.get("weights")
        is_named = isinstance(weights, ast.Attribute) or isinstance(
            getattr(weights, "value", None), str
        )  # not of samples
        if name == "from_pretrained" or getattr(pretrained, "value", None) is True or is_named:
            yield from ((path, name) for target in statement.targets if (path := _path(target)))


def drawn_again(statement: ast.stmt) -> str | None:
    """The part for all layers of which a statement draws new values: ``apply(init)``, or a loop with ``nn.init``."""
    call = (
        statement.value
        if isinstance(statement, ast.Expr)
        else statement.iter
        if isinstance(statement, ast.For)
        else None
    )
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    inner = ast.unparse(statement)
    is_applied = call.func.attr == "apply" and re.search(r"init|reset", inner.partition(".apply(")[2])
    is_loop = isinstance(statement, ast.For) and call.func.attr in ("modules", "parameters", "named_parameters")
    return _path(call.func.value) if is_applied or (is_loop and "init." in inner) else None


def _path(node: ast.expr) -> str | None:
    """The name of an attribute of ``self``; empty for itself."""
    if isinstance(node, ast.Name):
        return "" if node.id == "self" else None
    if isinstance(node, ast.Attribute) and (owner := _path(node.value)) is not None:
        return f"{owner}.{node.attr}".removeprefix(".")
    return None


def follow(seen: Evidence) -> None:
    """Note how many losses attributes of the module keep with their graphs, alone, in lists or added up."""
    for name, value in vars(seen.module).items():
        kept = [t for t in flatten(value) if isinstance(t, Tensor) and t.numel() == 1 and t.grad_fn is not None]
        if isinstance(value, Tensor) and kept:
            count = sum(node.name() in LOSSES for node in nodes_behind(value.grad_fn))
        else:
            count = len(kept)
        if count:
            seen.kept.setdefault((name, isinstance(value, Tensor)), []).append(count)


@check("graph-kept", "likely", at="trial")
def graph_kept(seen: Evidence) -> Lines:
    """An attribute keeps losses with their graphs, more of them at each step."""
    for (name, is_sum), counts in seen.kept.items():
        if seen.module.automatic_optimization and len(counts) >= KEPT and counts == sorted({*counts}):
            yield Line(
                f"self.{name} keeps a loss of each step with its graph, so memory grows with each batch; keep "
                "loss.detach(), or loss.item()",
                # A list is short where it is emptied after an epoch.
                None if is_sum else "note",
                subject=name,
            )


@check("cached-by-index", "likely", at="trial")
def cached_by_index(seen: Evidence) -> Lines:
    """A dictionary of the module has a tensor of samples for each number of a batch; batches are shuffled."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or not is_shuffled(seen):
        return
    count = probe.size("training_step")
    for name, value in vars(seen.module).items():
        if not isinstance(value, dict) or len(value) < 2 or [*value] != [*range(len(value))]:
            continue
        if not all(isinstance(t, Tensor) and t.ndim > 1 and len(t) == count for t in value.values()):
            continue
        trees = [tree_of(f) for cls in own_classes(type(seen.module)) for f in vars(cls).values() if is_function(f)]
        text = "\n".join(ast.unparse(tree) for tree in trees if tree is not None)
        if re.search(rf"in self\.{name}\b|self\.{name}\.(get|setdefault)\(", text):
            yield (
                f"{name} keeps what was computed of each batch by its number, but batches are shuffled, so in the next "
                "epoch a batch gets what belongs to other samples; use numbers of samples as keys"
            )
