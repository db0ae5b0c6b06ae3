"""Every private name of torch and Lightning that is used: an upgrade of either that breaks one is mended here.

Each has the reason why it is needed. Unless one is named, torch 2.13 and Lightning 2.6.6 have no public alternative,
and all versions that are supported have the name. ``tests/test_private_names.py`` checks that each is there, with the
expected parameters, and that other files use only those that ``IN_PLACE`` lists for them. Lightning is imported where
it is needed, as reading a checkpoint must not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from torch.utils.data._utils import pin_memory as _pin_memory

# By file: methods that subclasses override, attributes that they inherit, base classes, and what is replaced in an
# object while it trains: these stay where they are used.
IN_PLACE = {
    "callback/checkpoint": {
        "_save_checkpoint": "the score is only stored in checkpoints that this callback saves",
        "_save_topk_checkpoint": "a metric that is never logged is reported in one line",
        "_update_best_and_save": "max_gib",
        "_every_n_train_steps": "whether a ModelCheckpoint saves within epochs",
        "_train_time_interval": "the same",
    },
    "callback/ema": {
        "_foreach_lerp_": "one kernel for all weights",
        "_latest_update_step": "saved in checkpoints by Lightning's callback",
        "_local_tensor": "the shard of a parameter, exchanged without a copy",
    },
    "callback/plan": {
        "_milestones": "where the last schedule of a SequentialLR begins",
    },
    "callback/preemption": {
        "_should_check_val_fx": "whether a validation follows, which saves",
    },
    "callback/skip_no_op_hooks": {
        "_accelerator_connector": "the strategy, which each call of a hook asks for, by one property instead of three",
    },
    "checkpoint/unpickle": {
        "_open_zipfile_reader": "torch.load would take another unpickler",
        "_load": "the same",
        "_weights_only_unpickler": "has _get_allowed_globals",
        "_get_allowed_globals": "what weights_only=True allows, of which no more is allowed here",
        "_tensor_classes": "those of legacy formats",
        "_storage_classes": "storages are only referred to",
        "_tensor": "has _rebuild_from_type_v2",
        "_rebuild_from_type_v2": "replaced, as it calls a method that the file names",
        "_utils": "has _rebuild_parameter_with_state",
        "_rebuild_parameter_with_state": "the same",
        "_backward_hooks": "left out of a tensor's state",
    },
    "checks/hardware": {
        "_C": "the version of CUDA that the driver supports; builds for CPUs do not have it",
    },
    "checks/monitors": {
        "_results": "means of an unfinished epoch, which callback_metrics does not have",
    },
    "data/foreign_loader": {
        "_accelerator_connector": "a trainer reads use_distributed_sampler only when it is built",
        "_checkpoint_connector": "has _loaded_checkpoint",
        "_loaded_checkpoint": "whether the checkpoint was saved within an epoch",
        "_combined_loader": "whether loaders were replaced since the last epoch",
        "_combined_loader_states_to_load": "the states of loaders that Lightning restores",
        "_mode": "how loaders of different lengths are combined",
        "_prepare_dataloader": "Lightning's own, replaced on the trainer",
    },
    "data/hooks": {
        "_prepare_dataloader": "Lightning's samplers repeat samples, and overlap if weighted",
    },
    "data/iterable": {
        "_utils": "worker: has _worker_info",
        "_worker_info": "set while a worker's samples are counted in this process",
    },
    "diagnosis/averages": {
        "_foreach_copy_": "a name in code that averages weights",
        "_foreach_lerp_": "the same",
    },
    "diagnosis/calls": {
        "_version": "whether a parameter was changed in place",
    },
    "diagnosis/evidence": {
        "_compiled_call_impl": "whether a layer is compiled, where hooks and modes would recompile it",
    },
    "diagnosis/invariants": {
        "_computed": "whether a metric was computed since it was updated",
        "_update_count": "how often a metric was updated",
    },
    "diagnosis/nothing": {
        "_MockOptimizer": "what Lightning trains with if configure_optimizers returned None",
        "_version": "whether a parameter was changed in place",
    },
    "diagnosis/probe": {
        "_update_count": "how often a metric was updated",
    },
    "diagnosis/schedules": {
        "_milestones": "where the last schedule of a SequentialLR begins",
    },
    "diagnosis/statements": {
        "_forward_hooks": "a layer with hooks may be called for them",
    },
    "diagnosis/ranks": {
        "_get_default_store": "facts of ranks, for which none waits",
    },
    "diagnosis/balances": {
        "_backward_hooks": "a weight whose gradient a hook may change is not rated",
    },
    "diagnosis/layers": {
        "_forward_hooks": "how many hooks there are, which must not grow",
        "_forward_pre_hooks": "the same",
        "_backward_hooks": "the same",
    },
    "environment/workers": {
        "_MultiProcessingDataLoaderIter": "a worker that a signal kills ends training before it saves",
        "_workers": "the same",
    },
    "export/formats": {
        "_inductor": "decompositions, where torchao registers those of its operations",
    },
    "planning/estimate": {
        "_subclasses": "FakeTensorMode, in which tensors have no data",
        "_tools": "MemTracker; fake_collectives, the shapes that collectives return without other ranks",
        "_pre_fw_hook": "a hook of MemTracker that refuses frozen parameters",
        "_post_fw_hook": "the same",
        "_pre_bw_hook": "the same",
        "_post_bw_hook": "the same",
        "_internal": "FakeStore, of a process group without other ranks",
    },
    "report/media_logging": {
        "_DummyExperiment": "the experiment of a logger on other ranks than 0",
    },
    "strategy/buckets": {
        "_build_params_for_reducer": "the order of gradients",
        "_push_all_rebuilt_params": "the same",
    },
    "strategy/data_parallel": {
        "_replicate_for_data_parallel": "nn.parallel.replicate works on GPUs only",
    },
    "strategy/ddp": {
        "_timeout": "as long as that of collectives",
        "_ddp_kwargs": "the buckets of CPUs",
        "_setup_model": "buckets in a fixed order, without which a resumed run rounds sums otherwise",
        "_register_ddp_hooks": "compression, and sums through shared memory",
        "_configure_launcher": "launchers that forward signals and report why a rank failed",
        "_start_method": "the same",
        "_SubprocessScriptLauncher": "the launcher of ranks as commands",
        "_call_children_scripts": "the same",
        "_ChildProcessObserver": "Lightning's kills ranks before they have said why they failed",
        "_terminate_all": "the same",
    },
    "strategy/fsdp": {
        "_setup_model": "FSDP1 flattens parameters, by whose shapes they are grouped, so optimizers come first",
        "_lazy_load": "Lightning's unpickles without the restricted unpickler",
    },
    "strategy/horovod": {
        "_foreach_copy_": "one kernel for all gradients",
        "_sync_module_states": "broadcasts the weights of rank 0, as DDP does",
    },
    "strategy/model_parallel": {
        "_save_distributed_checkpoint": "an argument of Lightning's strategy",
        "_tensor_parallel_size": "the same",
        "_device_mesh": "device_mesh raises an error before the process group is initialized",
        "_layer_sync": "synchronized BatchNorm, applied before the model is sharded",
        "_utils": "compute_local_shape_and_global_offset; which rows a rank has, public only for all ranks",
        "_op_dispatcher": "torch has no fused SGD for DTensor",
        "_custom_op_handlers": "the same",
        "_fused_sgd_": "the same",
    },
    "strategy/mpi": {
        "_C": "has _create_work_from_future",
        "_distributed_c10d": "the same",
        "_create_work_from_future": "what collectives of a process group in Python return",
    },
    "strategy/pipeline": {
        "_compiled_call_impl": "whether a model is compiled",
        "_lightning_module": "teardown would move the task, whose meta tensors cannot be moved",
    },
    "strategy/process_launcher": {
        "_MultiProcessingLauncher": "the launcher of forked and spawned ranks",
        "_prctl_pr_set_pdeathsig": "the standard library has no prctl",
        "_start_method": "checked before the launch",
        "_strategy": "the same",
        "_wrapping_function": "where a rank starts and ends",
        "_recover_results_in_main_process": "how a rank ended, and weights that are not unpickled",
        "_interrupt": "what Lightning does after an error, but not in a rank",
    },
    "strategy/tpu": {
        "_WrappingCheckpointIO": "the only class that Lightning's strategies for TPUs accept besides their own",
    },
    "strategy/unused_parameters": {
        "_build_params_for_reducer": "DDP's reducer is replaced between two steps",
        "_build_debug_param_to_name_mapping": "names for the new reducer",
        "_ddp_init_helper": "the new reducer; a new wrapper would need a new forward pass",
        "_push_all_rebuilt_params": "keeps the order of gradients, as for the first reducer",
        "_check_reducer_finalized": "whether all gradients were averaged",
    },
    "task/cuda_graph": {
        "_optimizer_step_post_hooks": "hooks that a capture must not call, but each replay must",
        "_optimizer_step_pre_hooks": "hooks that no replay would call",
    },
    "task/metric_states": {
        "_update_count": "restored with the states, as averages divide by it",
    },
    "task/results": {
        "_LoggerConnector": "means over all ranks, where Lightning's are those of rank 0",
        "_results": "what was logged in the epoch, of any stage",
        "_active_loop": "whether a rank has run a batch",
        "_computed": "the cached result of an epoch",
        "_callback_metrics": "values of steps, or set by callbacks, that are monitored",
        "_first_loop_iter": "whether a batch is the first one of an epoch",
        "_every_n_train_steps": "whether a monitor is read within an epoch",
        "_train_time_interval": "the same",
    },
    "task/xla": {
        "_ops": "OpOverloadPacket, whose overloads torchax reads on import, also those removed in torch 2.13",
        "_register_device_module": "torchax would register a device, which torch.compile takes for an accelerator",
        "_should_use_torchax_tensor": "also trace tensors that are created in the program",
    },
    "training/ending": {
        "_should_check_val_fx": "without a validation at the end, the last weights have no score",
        "_iteration_based_training": "with max_steps, a resumed run would repeat the end of an epoch",
    },
    "training/resume_state": {
        "_checkpoint_connector": "has _loaded_checkpoint",
        "_loaded_checkpoint": "what Lightning restores right before training, unless a search has restored its own",
        "_combined_loader": "made for a search",
    },
    "training/failure": {
        "_run_exitfuncs": "Python's handlers at exit, before a process is ended without finalization",
        "_get_default_store": "still works after a collective has failed, to find out which rank is lost",
    },
}

# torch: the public classes are those of one dimension each, without the lazy ones and those of users.
BatchNorm, NormWithStatistics = batchnorm._BatchNorm, batchnorm._NormBase

# torch: the leaves of nested loaders and outputs; the public alternative, optree, would be one more dependency.
tree_leaves, tree_map, tree_map_only = _pytree.tree_leaves, _pytree.tree_map, _pytree.tree_map_only

# torch: moves nested batches to pinned memory as DataLoader does, for batches that are read without one.
pin_memory: Callable[[Any], Any] = _pin_memory.pin_memory

# torch: one kernel for all tensors of a model. clip_grads_with_norm_ of nn.utils takes half as long again.
foreach_norm, foreach_mul_ = torch._foreach_norm, torch._foreach_mul_


# torch: DTensor.to_local() would record a step of autograd; other tensors are whole.
def local_shard(tensor: Any) -> Any:
    """This rank's shard of a tensor, or the tensor."""
    return getattr(tensor, "_local_tensor", tensor)


# torch: else buffers that differ between ranks on purpose, such as those of metrics, would become those of rank 0.
ignore_in_ddp: Callable[..., None] = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model


# torch: state_dict would gather the weights of all ranks.
def saved_buffers(module: Any) -> Iterator[Tensor]:
    """The buffers of a module that its ``state_dict`` has."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield buffer


# Lightning: what its callbacks average has no public name.
def averaged_weights(callback: Any) -> list[Tensor]:
    """The averages of weights that a callback keeps: ours in ``averages``, Lightning's in a copy of the module."""
    model = getattr(callback, "_average_model", None)
    found = getattr(callback, "averages", None) or (model.parameters() if model is not None else ())
    return [*found]


def prefix_rendezvous(prefix: str) -> None:
    """Give the keys of this process in the store of torchrun a prefix.

    Since torch 2.13 the attempts of a job share a store, so a restarted rank would read the addresses of the last one.
    """
    from importlib import import_module

    rendezvous: Any = import_module("torch.distributed.rendezvous")  # a function hides it as an attribute
    create = rendezvous._create_c10d_store
    prefixed: Any = torch.distributed.PrefixStore  # type: ignore[attr-defined]
    rendezvous._create_c10d_store = lambda *args, **options: prefixed(prefix, create(*args, **options))


def scale_outside_step(optimizer: Any) -> None:
    """Let the trainer unscale the gradients of a fused optimizer, which would do so after they were clipped."""
    if hasattr(optimizer, "_step_supports_amp_scaling"):
        optimizer._step_supports_amp_scaling = False


def set_last_rates(scheduler: Any, rates: Sequence[Any]) -> None:
    """Set what ``get_last_lr`` returns, and what some schedulers compute their next rate from."""
    scheduler._last_lr = list(rates)


def clear_compilations(limit: int) -> None:
    """Forget compilations so far, and remember up to ``limit`` others. ``torch.compiler`` reports only to a log."""
    from torch._dynamo import utils  # slow

    utils.clear_compilation_metrics()
    utils.set_compilation_metrics_limit(limit)


def recompile_reasons() -> list[str]:
    """The reason of each recompilation since ``clear_compilations``."""
    from torch._dynamo.utils import get_compilation_metrics

    return [metric.recompile_reason for metric in get_compilation_metrics() if metric.recompile_reason]


def reductions(metric: Any) -> dict[str, Any]:
    """Torchmetrics: how each state is reduced over ranks, by which saved states are merged if their number changes."""
    found: dict[str, Any] = metric._reductions
    return found


def disable_compute_groups(collection: Any) -> None:
    """Torchmetrics: let metrics that were created with ``compute_groups=True``, its default, not share their state."""
    if collection._enable_compute_groups is True:
        list(collection.items(copy_state=True))  # those that share one get a copy
        collection._enable_compute_groups, collection._groups, collection._groups_checked = False, {}, False


def hook_name(task: Any) -> str | None:
    """Name of the hook that Lightning calls; in others than that of the step, a task logs by Lightning."""
    name: str | None = task._current_fx_name
    return name


def find_trainer(task: Any) -> Any:
    """The trainer of a task, or None, where ``trainer`` raises an error."""
    return task._trainer


def logger_connector(trainer: Any) -> Any:
    """Writes a row to all loggers at once; ``log`` of Lightning takes as long as a step of a small model."""
    return trainer._logger_connector


def set_timeout(strategy: Any, timeout: timedelta) -> None:
    """Set the timeout of collectives of any strategy with several ranks, also of one whose constructor takes none."""
    if hasattr(strategy, "_timeout"):
        strategy._timeout = timeout


def launches_processes(strategy: Any) -> bool:
    """Whether Lightning's launcher forks or spawns the ranks, which forwards no signals and loads weights by pickle."""
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

    return type(strategy.launcher) is _MultiProcessingLauncher


def set_launcher(strategy: Any, launcher: Callable[[Any, Any], Any]) -> None:
    """Replace the launcher of forked or spawned ranks."""
    strategy._launcher = launcher(strategy, strategy.launcher._start_method)


def has_checkpoint_io(strategy: Any) -> bool:
    """Whether a strategy, or its trainer, was given a ``CheckpointIO``; else it creates one when it is asked."""
    return getattr(strategy, "_checkpoint_io", None) is not None


def get_timeout(strategy: Any) -> timedelta | None:
    """The timeout of collectives, for further process groups."""
    return getattr(strategy, "_timeout", None)


def replace_signal_handling(trainer: Any, install: Callable[[], None]) -> None:
    """Install other handlers than Lightning's, which run collectives in the handler and deadlock.

    Lightning also broadcasts at each step whether rank 0 has received a signal, and waits for the device.
    """
    trainer._signal_connector.register_signal_handlers = install
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _do_nothing


def restore_signal_handling(trainer: Any) -> None:
    """Undo ``replace_signal_handling``."""
    vars(trainer._signal_connector).pop("register_signal_handlers", None)
    vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)


def _do_nothing() -> None:  # no lambda, as a trainer may be pickled
    pass


def set_logger_connector(trainer: Any, connector: Any) -> None:
    """Let a subclass of Lightning's collect what is logged, which ``sync_dist`` alone reduces over ranks."""
    trainer._logger_connector = connector


def epoch_results(trainer: Any) -> Any:
    """What the module has logged in this epoch, which Lightning does not save."""
    return trainer.fit_loop.epoch_loop._results


def continue_results(trainer: Any) -> None:
    """Let Lightning continue the results of an epoch, which it would reset at the first batch after a resume."""
    trainer._logger_connector._first_loop_iter = False


def log_epoch(trainer: Any) -> None:
    """Log the metrics of an epoch, once; Lightning does so after the checkpoint from which a killed run resumes."""
    connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    if "update_train_epoch_metrics" in vars(connector):
        return
    logged = connector.metrics["log"]
    loop._batches_that_stepped -= 1  # as Lightning does: the step of the last batch
    connector.log_metrics(logged)
    loop._batches_that_stepped += 1
    connector.update_train_epoch_metrics = partial(_log_others, connector, set(logged))


def _log_others(connector: Any, logged: set[str]) -> None:
    del connector.update_train_epoch_metrics
    connector.log_metrics({name: value for name, value in connector.metrics["log"].items() if name not in logged})
    connector.reset_results()


def data_connector(trainer: Any) -> Any:
    """Attaches hooks of the data before ``fit``, and prepares loaders; Lightning's samplers repeat samples."""
    return trainer._data_connector


def data_fetcher(trainer: Any) -> Any:
    """Has the batches that Lightning has read ahead, which are not trained on yet."""
    return trainer.fit_loop._data_fetcher


def active_fetcher(trainer: Any) -> Any:
    """What reads the batches of the loop that runs, from its ``iterator``; None before and after it."""
    return getattr(trainer._active_loop, "_data_fetcher", None)


def combination(combined_loader: Any) -> str:
    """How Lightning combines several loaders, such as ``max_size_cycle``."""
    return str(combined_loader._mode)


def batches_ahead(trainer: Any) -> int:
    """Number of batches that were read for training and not handed to a step, when nothing is being read."""
    fetcher = data_fetcher(trainer)
    settle = getattr(getattr(fetcher, "iterator", None), "settle", None)  # of a Prefetcher
    return (settle() if settle else 0) + len(getattr(fetcher, "batches", ()))


def load_loader_states(trainer: Any) -> None:
    """Load the states of loaders, also at the end of an epoch, or if a scheduler has asked for the number of steps."""
    loop, states = trainer.fit_loop, trainer.fit_loop._combined_loader_states_to_load
    if states and (loop.restarting or not trainer.reload_dataloaders_every_n_epochs):
        loop._combined_loader._load_state_dicts(states)
    loop._combined_loader_states_to_load = []


def is_accumulating(trainer: Any) -> bool:
    """Whether the gradients of this batch are added to those of the next one, so that there is no step."""
    return bool(trainer.fit_loop._should_accumulate())


def is_last_batch(trainer: Any) -> bool:
    """Whether the epoch has no further batch, also by ``limit_train_batches``, which ``is_last_batch`` ignores."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def can_stop_early(trainer: Any) -> bool:
    """Whether ``min_epochs`` and ``min_steps`` are reached, before which ``should_stop`` has no effect."""
    return bool(trainer.fit_loop._can_stop_early)


def batches_with_step(trainer: Any) -> int:
    """The step by which loggers count: unlike ``global_step``, that of one of several optimizers."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def has_validated(trainer: Any) -> bool:
    """Whether a validation has run, after which a metric that is missing is never logged."""
    return bool(trainer.fit_loop.epoch_loop.val_loop._has_run)


# callback/skip_no_op_hooks: functions of ``lightning.pytorch.trainer.call`` that call hooks of callbacks, module and
# strategy. What they do besides takes a third of a small model's step.
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
