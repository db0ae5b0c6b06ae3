"""What the keys of Hydra, lightning-hydra-template and Lightning CLI are called here."""

from __future__ import annotations

import re
import sys
from typing import Any

# Keys of other templates, the longest first, and the keys that have their meaning here.
RENAMED = {
    "callbacks.model_checkpoint": "callback.best",
    "callbacks": "callback",
    "datamodule": "data",
    "hparams_search": "search",
    "hydra.job.name": "name",
    "hydra.launcher": "launch",
    "hydra.run.dir": "folder",
    "hydra.runtime.output_dir": "folder",
    "hydra.sweep.dir": "runs",
    "hydra.sweeper": "search",
    "lr_scheduler": "scheduler",
    "optimized_metric": "search.metric",
    "paths.log_dir": "runs",
    "paths.output_dir": "folder",
    "paths.root_dir": "root",
    "seed_everything": "seed",
    "task_name": "name",
    "trainer.callbacks": "callback",
    "trainer.default_root_dir": "folder",
    "trainer.gpus": "trainer.devices",
    "trainer.logger": "logger",
    "trainer.resume_from_checkpoint": "resume",
}
REMOVED = ("trainer.gpus", "trainer.resume_from_checkpoint")  # arguments of older versions of Lightning
OPTIONS = {  # of lightning-hydra-template, and the arguments that take their place
    "callback=none": "callback=null",
    "debug=default": "debug=limit, or debug=[limit,anomaly]",
    "debug=fdr": "debug=fast",
    "debug=profiler": "debug=profile",
    "logger=many_loggers": "logger=[csv,tensorboard]",
    "trainer=cpu": "trainer.accelerator=cpu",
    "trainer=ddp_sim": "trainer=ddp trainer.accelerator=cpu trainer.devices=2",
    "trainer=gpu": "trainer.accelerator=gpu",
    "trainer=mps": "trainer.accelerator=mps",
}
ADVICE = {  # for keys that have no counterpart
    "ckpt_path": "use resume=<folder of a run>, or `boltcutter evaluate run=<folder> ckpt=<file>`",
    "extras": "leave it out; nothing reads it",
    "hydra": "leave it out; Hydra is not used",
    "now": "leave it out; each run has a folder of its own, ${folder}",
    "paths": "set the path where it is used, such as data.data_dir=…",
    "run": "use resume=<folder> to continue a run, or `boltcutter evaluate run=<folder>`",
    "train": "leave it out; to test without training, use `boltcutter evaluate run=<folder>`",
}
COMMANDS = {"fit": "train", "run": "train", "eval": "evaluate", "test": "evaluate", "validate": "evaluate"}


def renamed(key: str) -> str | None:
    """The key that has the meaning of another template's ``key`` here; None if that is not known.

    Args:
        key: A key such as ``callbacks.early_stopping.patience``, a group such as ``hydra/launcher``, or the contents of
            a reference, such as ``hydra:runtime.output_dir``.
    """
    path = re.sub(r"[/:]", ".", key).strip(".")
    theirs = next((prefix for prefix in RENAMED if f"{path}.".startswith(f"{prefix}.")), "")
    ours = RENAMED.get(theirs, "") + path[len(theirs) :]
    ours = ours.replace(".init_args.", ".").replace(".class_path", "._target_")
    return ours if ours != path else None


def replacement(key: str, value: str) -> str | None:
    """The overrides that mean what another template's ``key=value`` means; None if that is not known."""
    if key == "trainer.gpus":
        return (
            "trainer.accelerator=cpu" if value in ("0", "null") else f"trainer.devices={value} trainer.accelerator=gpu"
        )
    ours = renamed(key)
    return ours and f"{ours}={value}"


def advice(key: str) -> str | None:
    """What to do instead of setting a key, or referring to one, that has no counterpart here."""
    return ADVICE.get(re.split(r"[./:]", key, maxsplit=1)[0])


def reference_remedy(name: str) -> str | None:
    """What to write instead of a reference to ``name``, such as ``hydra:runtime.output_dir``; None if not known."""
    ours = renamed(name)
    return f"write ${{{ours}}}" if ours else advice(name)


def defaults_remedy(defaults: Any) -> str | None:
    """What to write instead of a list of defaults as in Hydra; None if it is no such list."""
    for entry in defaults if isinstance(defaults, list) else ():
        for key, option in (entry if isinstance(entry, dict) else {entry: None}).items():
            group = re.sub(r"(override|optional)\s+", "", str(key)).strip("/").partition("@")[0]
            if option is not None:
                remedy = advice(group) or f"write {renamed(group) or group}: {option}, without the dash"
                return f"'- {key}: {option}' is Hydra's syntax; {remedy}"
            if key == "_self_":
                return f"'- {key}' is Hydra's syntax; leave it out"
    return None


def with_targets(node: Any) -> Any:
    """Convert ``class_path`` and ``init_args`` of Lightning CLI to ``_target_`` and arguments, at every depth."""
    if isinstance(node, list):
        return [with_targets(value) for value in node]
    if not isinstance(node, dict):
        return node
    if isinstance(node.get("class_path"), str) and node.keys() <= {"class_path", "init_args", "dict_kwargs"}:
        arguments = (node.get("init_args") or {}) | (node.get("dict_kwargs") or {})
        return {"_target_": node["class_path"], **with_targets(arguments)}
    return {key: with_targets(value) for key, value in node.items()}


def remedy(kind: Any) -> str:
    """What to do if a class derives from ``pytorch_lightning``, but this process uses ``lightning``; empty if not."""
    bases = {base.__module__.partition(".")[0] for base in getattr(kind, "__mro__", ())}
    same = sys.modules.get("pytorch_lightning") is sys.modules.get("lightning.pytorch")
    return (
        "; pytorch_lightning was imported before boltcutter, so its classes are not those of lightning: import "
        "boltcutter first, or import lightning.pytorch instead of pytorch_lightning"
        if "pytorch_lightning" in bases and not same
        else ""
    )
