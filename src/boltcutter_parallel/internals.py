"""Every private name of torch and Lightning that this part uses, besides those of ``boltcutter.internals``.

Unless one is named, torch 2.13 and Lightning 2.6.6 have no public alternative, and all versions that are supported have
the name. ``tests/test_private_names.py`` checks that each is there, and that this part uses no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map as tree_map  # optree would be one more dependency
from torch.utils._pytree import tree_map_only as tree_map_only

USED = {  # by name: the file that uses it, and why
    "_foreach_lerp_": "ema: one kernel for all weights",
    "_latest_update_step": "ema: saved in checkpoints by Lightning's callback",
    "_local_tensor": "ema: the shard of a parameter, exchanged without a copy",
    "_setup_model": "fsdp: FSDP1 flattens parameters, by whose shapes they are grouped, so optimizers come first",
    "_lazy_load": "fsdp: Lightning's unpickles without the restricted unpickler",
    "_foreach_copy_": "horovod: one kernel for all gradients",
    "_sync_module_states": "horovod: broadcasts the weights of rank 0, as DDP does",
    "_save_distributed_checkpoint": "model_parallel: an argument of Lightning's strategy",
    "_tensor_parallel_size": "model_parallel: the same",
    "_device_mesh": "model_parallel: device_mesh raises an error before the process group is initialized",
    "_layer_sync": "model_parallel: synchronized BatchNorm, applied before the model is sharded",
    "_utils": "model_parallel: compute_local_shape_and_global_offset; which rows a rank has, public only for all ranks",
    "_op_dispatcher": "model_parallel: torch has no fused SGD for DTensor",
    "_custom_op_handlers": "model_parallel: the same",
    "_fused_sgd_": "model_parallel: the same",
    "_C": "mpi: has _create_work_from_future",
    "_distributed_c10d": "mpi: the same",
    "_create_work_from_future": "mpi: what collectives of a process group in Python return",
    "_compiled_call_impl": "pipeline: whether a model is compiled",
    "_lightning_module": "pipeline: teardown would move the task, whose meta tensors cannot be moved",
    "_MultiProcessingLauncher": "process_launcher: the launcher of forked and spawned ranks",
    "_prctl_pr_set_pdeathsig": "process_launcher: the standard library has no prctl",
    "_start_method": "process_launcher: checked before the launch",
    "_strategy": "process_launcher: the same",
    "_wrapping_function": "process_launcher: where a rank starts and ends",
    "_recover_results_in_main_process": "process_launcher: how a rank ended, and weights that are not unpickled",
    "_replicate_for_data_parallel": "data_parallel: nn.parallel.replicate works on GPUs only",
    "_WrappingCheckpointIO": "tpu: the only class that Lightning's strategies for TPUs accept besides their own",
    "_build_params_for_reducer": "unused_parameters: DDP's reducer is replaced between two steps",
    "_build_debug_param_to_name_mapping": "unused_parameters: names for the new reducer",
    "_ddp_init_helper": "unused_parameters: the new reducer; a new wrapper would need a new forward pass",
    "_push_all_rebuilt_params": "unused_parameters: keeps the order of gradients, as for the first reducer",
    "_check_reducer_finalized": "unused_parameters: whether all gradients were averaged",
    "_ops": "xla: OpOverloadPacket, whose overloads torchax reads on import, also those removed in torch 2.13",
    "_register_device_module": "xla: torchax would register a device, which torch.compile takes for an accelerator",
    "_should_use_torchax_tensor": "xla: also trace tensors that are created in the program",
}

# skip_no_op_hooks: functions of ``lightning.pytorch.trainer.call`` that call hooks of callbacks, module and strategy.
# What they do besides takes a third of a small model's step.
CALLING = ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook")

CURRENT_HOOK = "_current_fx_name"  # of a module: the hook that Lightning calls, on which the defaults of ``log`` depend


def move_some(task: Any, device: torch.device, is_moved: Callable[[Tensor], bool]) -> None:
    """Move some tensors of a task to its device; ``to`` moves all, also those that are offloaded or on meta."""
    task._apply(lambda tensor: tensor.to(device) if is_moved(tensor) else tensor)
    task._device = device


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for a while."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
