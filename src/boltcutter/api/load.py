"""Build task and data of a run, with the weights of a checkpoint."""

from __future__ import annotations

from boltcutter.assembly.assemble import Components, assemble, complete_config
from boltcutter.assembly.overrides import load_evaluation_config
from boltcutter.checkpoint.load import load_checkpoint
from boltcutter.config.errors import as_config_error
from boltcutter.config.values import split_overrides
from boltcutter.environment.warning_filters import filter_warnings
from boltcutter.evaluation.evaluate import explain_mismatch
from boltcutter.project import Project
from boltcutter.protocols import NativeData
from boltcutter.run.best import find_checkpoint


def load_components(project: Project, overrides: list[str]) -> Components:
    """Build the components of a run on the CPU, and load the weights of a checkpoint.

    Returns:
        The components, with the task in evaluation mode.
    """
    filter_warnings()
    special, rest = split_overrides(overrides, "run", "ckpt")
    cfg, _ = load_evaluation_config(project, special, ["trainer.accelerator=cpu", "trainer.devices=1", *rest])
    cfg = complete_config(cfg)
    components = assemble(cfg, with_callbacks=False)
    task, data = components.task, components.data
    checkpoint = find_checkpoint(cfg.place, special.get("ckpt", "best"))
    state = load_checkpoint(checkpoint)
    with as_config_error():
        if isinstance(data, NativeData):
            data.load_state_dict(state.get(type(data).__qualname__, {"statistics": {}}))
        if data is not None:
            data.prepare_data()
            data.setup(stage="fit")
    with explain_mismatch(checkpoint):
        task.on_load_checkpoint(state)
        task.load_state_dict(state["state_dict"])
    task.eval()
    return components
