"""Private names of torch, Lightning and other libraries that are used: an upgrade that changes one fails here first."""

import ast
import functools
import importlib
import inspect
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sources import FILES, SRC, in_one_process, nodes

from boltcutter.internals import IN_PLACE

LISTED = {name for names in IN_PLACE.values() for name in names}

# Of libraries besides torch and Lightning, in the one file that uses them.
OF_OTHERS = {
    "boltcutter/config/annotations.py": {"_dereference_node", "_get_node", "_is_interpolation", "_set_value"},
    "boltcutter/config/compose.py": {"_set_value"},
    "boltcutter/config/values.py": {
        *("_deepcopy_impl", "_dereference_node", "_get_node", "_is_interpolation", "_is_missing", "_is_none"),
        "_set_value",
    },
    "boltcutter/environment/workers.py": {"_popen"},
    "boltcutter/launch/ray.py": {"_do_request"},
    "boltcutter/logger/wandb.py": {"_proc", "_wandb_init", "_wl"},
    "boltcutter/model/keras_model.py": {"_flatten_layers", "_trainable_variables"},
    "boltcutter/search/study.py": {"_study_id", "_trial_id"},
}

# Module → owner (a class, or "" for the module itself) → name → its parameters; None: an attribute.
NAMES: dict[str, dict[str, dict[str, str | None]]] = {
    "atexit": {"": {"_run_exitfuncs": None}},
    "lightning.fabric.loggers.logger": {
        "": {"_DummyExperiment": None},
    },
    "lightning.fabric.strategies.launchers.subprocess_script": {
        "_ChildProcessObserver": {"_terminate_all": "self"},
    },
    "lightning.fabric.utilities.device_dtype_mixin": {
        "_DeviceDtypeModuleMixin": {"_device": None},
    },
    "lightning.pytorch.callbacks.weight_averaging": {
        "WeightAveraging": {"_latest_update_step": None, "_average_model": None},
    },
    "lightning.pytorch.callbacks.stochastic_weight_avg": {
        "StochasticWeightAveraging": {"_average_model": None},
    },
    "lightning.fabric.utilities.seed": {
        "": {"_collect_rng_states": "include_cuda", "_set_rng_states": "rng_state_dict"},
    },
    "lightning.pytorch.callbacks.model_checkpoint": {
        "ModelCheckpoint": {
            "_every_n_train_steps": None,
            "_train_time_interval": None,
            "_save_checkpoint": "self trainer filepath",
            "_save_topk_checkpoint": "self trainer monitor_candidates",
            "_update_best_and_save": "self current trainer monitor_candidates",
        },
    },
    "lightning.pytorch.core.module": {
        "LightningModule": {
            "_current_fx_name": None,
            "_trainer": None,
            "_apply_batch_transfer_handler": "self batch device dataloader_idx",
            "_on_before_batch_transfer": "self batch dataloader_idx",
        },
    },
    "lightning.pytorch.core.optimizer": {
        "": {"_MockOptimizer": None},
    },
    "lightning.pytorch.loggers.wandb": {
        "WandbLogger": {"_wandb_init": None},
    },
    "lightning.pytorch.loops.evaluation_loop": {
        "_EvaluationLoop": {"_has_run": None},
    },
    "lightning.pytorch.loops.fit_loop": {
        "_FitLoop": {
            "_combined_loader": None,
            "_combined_loader_states_to_load": None,
            "_can_stop_early": None,
            "_data_fetcher": None,
            "_iteration_based_training": "self",
            "_should_accumulate": "self",
        },
    },
    "lightning.pytorch.loops.training_epoch_loop": {
        "_TrainingEpochLoop": {
            "_batches_that_stepped": None,
            "_results": None,
            "_num_ready_batches_reached": "self",
            "_should_accumulate": "self",
            "_should_check_val_fx": "self data_fetcher",
            "_should_check_val_epoch": "self",
            "_build_kwargs": "self kwargs batch batch_idx",
            "_broadcast_sigterm_tensor": "self",
        },
    },
    "lightning.pytorch.overrides.distributed": {
        "": {"_sync_module_states": "module"},
    },
    "lightning.pytorch.plugins.io.wrapper": {
        "": {"_WrappingCheckpointIO": None},
    },
    "lightning.pytorch.strategies.ddp": {
        "DDPStrategy": {
            "_ddp_kwargs": None,
            "_start_method": None,
            "_timeout": None,
            "_configure_launcher": "self",
            "_register_ddp_hooks": "self",
            "_setup_model": "self model",
        },
    },
    "lightning.pytorch.strategies.fsdp": {
        "": {"_lazy_load": "filename"},
    },
    "lightning.pytorch.strategies.launchers": {
        "_SubprocessScriptLauncher": {"_call_children_scripts": "self"},
        "_MultiProcessingLauncher": {
            "_recover_results_in_main_process": "self worker_output trainer",
            "_wrapping_function": "self process_idx trainer function args kwargs return_queue global_states",
            "_start_method": None,
            "_strategy": None,
        },
    },
    "lightning.pytorch.strategies.model_parallel": {
        "ModelParallelStrategy": {
            "_device_mesh": None,
            "_save_distributed_checkpoint": None,
            "_tensor_parallel_size": None,
        },
    },
    "lightning.pytorch.strategies.parallel": {
        "ParallelStrategy": {"_layer_sync": None},
    },
    "lightning.pytorch.strategies.strategy": {
        "Strategy": {"_lightning_module": None},
    },
    "lightning.pytorch.trainer.call": {
        "": {
            "_call_callback_hooks": "trainer hook_name",
            "_call_lightning_module_hook": "trainer hook_name",
            "_call_strategy_hook": "trainer hook_name",
            "_interrupt": "trainer exception",
        },
    },
    "lightning.pytorch.trainer.connectors.callback_connector": {
        "_CallbackConnector": {"_reorder_callbacks": "callbacks"},
    },
    "lightning.pytorch.trainer.connectors.checkpoint_connector": {
        "_CheckpointConnector": {"_loaded_checkpoint": None},
    },
    "lightning.pytorch.trainer.connectors.data_connector": {
        "_DataConnector": {"_prepare_dataloader": "self dataloader shuffle mode"},
    },
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector": {
        "_LoggerConnector": {"_callback_metrics": None, "_first_loop_iter": None},
        "": {"_LoggerConnector": None},
    },
    "lightning.pytorch.trainer.connectors.logger_connector.result": {
        "_ResultMetric": {"_computed": None, "_forward_cache": None},
    },
    "lightning.pytorch.trainer.trainer": {
        "Trainer": {
            "_accelerator_connector": None,
            "_active_loop": None,
            "_checkpoint_connector": None,
            "_data_connector": None,
            "_logger_connector": None,
            "_signal_connector": None,
            "_results": None,
        },
    },
    "lightning.pytorch.utilities.combined_loader": {
        "CombinedLoader": {"_mode": None, "_load_state_dicts": "self states"},
    },
    "multiprocessing.process": {
        "BaseProcess": {"_popen": None},
    },
    "omegaconf.dictconfig": {
        "DictConfig": {
            "_get_node": "self key validate_access validate_key throw_on_missing_value throw_on_missing_key",
            "_is_interpolation": "self",
            "_is_missing": "self",
            "_is_none": "self",
        },
    },
    "omegaconf.nodes": {
        "AnyNode": {
            "_deepcopy_impl": "self res memo",
            "_dereference_node": "self",
            "_set_value": "self value flags",
            "_value": "self",
        },
    },
    "torch._tensor": {"": {"_rebuild_from_type_v2": "func new_type args state"}},
    "torch._utils": {"": {"_rebuild_parameter_with_state": "data requires_grad backward_hooks state"}},
    "torch": {
        "Tensor": {"_backward_hooks": None, "_post_accumulate_grad_hooks": None},
        "": {
            "_foreach_copy_": None,
            "_foreach_lerp_": None,
            "_foreach_mul_": None,
            "_foreach_norm": None,
            "_fused_sgd_": None,
            "_register_device_module": None,
            "_storage_classes": None,
            "_tensor_classes": None,
        },
    },
    "torch._C._distributed_c10d": {
        "": {"Work": None, "_create_work_from_future": None},
    },
    "torch._dynamo.utils": {
        "": {"get_compilation_metrics": ""},
    },
    "torch._inductor.decomposition": {
        "": {"decompositions": None},
    },
    "torch._ops": {
        "": {"OpOverloadPacket": None},
    },
    "torch._subclasses.fake_tensor": {
        "": {"FakeTensorMode": None},
    },
    "torch._weights_only_unpickler": {
        "": {"_get_allowed_globals": None},
    },
    "torch.distributed": {
        "Reducer": {"_push_all_rebuilt_params": None, "_rebuild_buckets": None},
    },
    "torch.distributed.distributed_c10d": {
        "": {"_abort_process_group": "group", "_get_default_store": ""},
    },
    "torch.distributed._tools.fake_collectives": {
        "": {},
    },
    "torch.distributed._tools.mem_tracker": {
        "MemTracker": {
            "_pre_fw_hook": "self module inputs",
            "_post_fw_hook": "self module inputs outputs",
            "_pre_bw_hook": "self module args",
            "_post_bw_hook": "self module args",
            "get_tracker_snapshot": "self type",
        },
    },
    "torch.distributed.rendezvous": {
        "": {"_create_c10d_store": "hostname port rank world_size timeout use_libuv"},
    },
    "torch.distributed.tensor": {
        "DTensor": {"_local_tensor": None, "_op_dispatcher": None},
    },
    "torch.distributed.tensor._dispatch": {
        "OpDispatcher": {"_custom_op_handlers": None},
    },
    "torch.distributed.tensor._utils": {
        "": {"compute_local_shape_and_global_offset": "global_shape mesh placements"},
    },
    "torch.multiprocessing": {
        "": {"_prctl_pr_set_pdeathsig": None},
    },
    "torch.nn.modules.batchnorm": {
        "": {"_BatchNorm": None, "_NormBase": None},
    },
    "torch.nn.modules.dropout": {
        "": {"_DropoutNd": None},
    },
    "torch.nn.modules.module": {
        "Module": {
            "_replicate_for_data_parallel": "self",
            **dict.fromkeys(["_compiled_call_impl", "_forward_hooks", "_forward_pre_hooks"]),
        },
    },
    "torch.nn.parallel.distributed": {
        "DistributedDataParallel": {
            "_build_debug_param_to_name_mapping": "self parameters",
            "_build_params_for_reducer": "self",
            "_check_reducer_finalized": "self",
            "_ddp_init_helper": "self parameters expect_sparse_gradient param_to_name_mapping static_graph",
            "_set_params_and_buffers_to_ignore_for_model": "module params_and_buffers_to_ignore",
        },
    },
    "torch.optim.adam": {
        "Adam": {"_step_supports_amp_scaling": None},
    },
    "torch.optim.optimizer": {
        "Optimizer": {"_optimizer_step_post_hooks": None, "_optimizer_step_pre_hooks": None},
    },
    "torch.optim.lr_scheduler": {
        "LRScheduler": {"_last_lr": None},
        "SequentialLR": {"_milestones": None},
    },
    "torch.serialization": {
        "": {
            "_open_zipfile_reader": None,
            "_load": "zip_file map_location pickle_module pickle_file overall_storage",
        },
    },
    "torch.testing._internal.distributed.fake_pg": {
        "": {"FakeStore": None},
    },
    "torch.utils._pytree": {
        "": {
            "tree_leaves": "tree is_leaf",
            "tree_map_only": "type_or_types_or_pred func tree is_leaf",
            "tree_flatten": "tree is_leaf",
            "tree_unflatten": "leaves treespec",
        },
    },
    "torch.utils.data._utils.pin_memory": {
        "": {"pin_memory": "data device"},
    },
    "torch.utils.data._utils.worker": {
        "": {"_worker_info": None},
    },
    "torch.utils.data.dataloader": {
        "_MultiProcessingDataLoaderIter": {"_workers": None},
    },
    "torchmetrics.collections": {
        "MetricCollection": {"_enable_compute_groups": None, "_groups": None, "_groups_checked": None},
    },
    "torchmetrics.metric": {
        "Metric": {"_defaults": None, "_reductions": None, "_update_count": None},
    },
}

# Of libraries that are optional, or installed only for some versions of Python.
NAMES_OF_EXTRAS: dict[str, dict[str, dict[str, str | None]]] = {
    "keras.src.layers.layer": {
        "Layer": {"_flatten_layers": "self include_self recursive", "_trainable_variables": None}
    },
    "optuna.study": {"Study": {"_study_id": None}},
    "optuna.trial": {"FrozenTrial": {"_trial_id": None}},
    "ray.dashboard.modules.dashboard_sdk": {"SubmissionClient": {"_do_request": "self method endpoint"}},
    "wandb.sdk.lib.service.service_connection": {"ServiceConnection": {"_proc": None}},
    "wandb.sdk.lib.service.service_process": {"ServiceProcess": {"_process": None}},
    "wandb.sdk.wandb_run": {"Run": {"_wl": None}},
}
ALL_NAMES = NAMES | NAMES_OF_EXTRAS

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

# Part of a documented interface in spite of the underscore.
DOCUMENTED = {
    "_asdict", "_fields", "_replace",  # namedtuple
    "_apply", "_buffers", "_modules", "_parameters", "_non_persistent_buffers_set",  # nn.Module, pickled as such
    "_partial_", "_target_", "_args_", "_self_",  # keys of configurations
    "_exit", "_compat_pickle", "_getframe",  # the standard library
}  # fmt: skip


def owner_of(module: str, owner: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in owner.split(".") if owner else ():
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(("module", "owner"), [(m, o) for m, owners in ALL_NAMES.items() for o in owners])
def test_private_names_are_there_with_the_expected_parameters(
    module: str, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    if module in NAMES_OF_EXTRAS:
        pytest.importorskip(module if module.startswith("keras.") else module.split(".")[0])  # not tests/keras
    holder = owner_of(module, owner)
    for name, parameters in ALL_NAMES[module][owner].items():
        if parameters is not None:
            found = list(inspect.signature(getattr(holder, name)).parameters.values())
            count = len(parameters.split())
            assert " ".join(parameter.name for parameter in found[:count]) == parameters, name
            added = [parameter for parameter in found[count:] if parameter.kind not in VARIADIC]
            assert all(parameter.default is not parameter.empty for parameter in added), name  # newer, but optional
        elif not hasattr(holder, name):  # set by a method
            assert re.search(rf"self\.{name}\b(: [^=]+)? = |^    {name}: ", inspect.getsource(holder), re.M), name


def test_torchax_has_its_private_name() -> None:
    """Its import has side effects that the tests of ``task.compile=xla`` contain, so only its text is read here."""
    spec = find_spec("torchax")
    if spec is None or spec.origin is None:
        pytest.skip("torchax is not installed")
    assert "def _should_use_torchax_tensor(self, device)" in Path(spec.origin).with_name("tensor.py").read_text()


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


@functools.cache
def used() -> dict[str, set[str]]:
    """Private names of other libraries, and the files that use them."""
    found_nodes = [(file, node) for file in FILES for node in nodes(file)]
    defined = [
        node.name for _, node in found_nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    own = set(defined)
    own |= {node.id for _, node in found_nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {
        node.attr
        for _, node in found_nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value)
    }
    found: dict[str, set[str]] = {}
    for file, node in found_nodes:
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
            if is_super(node.value) and defined.count(node.attr) == 1:  # overrides a library's method
                own = own - {node.attr}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("boltcutter"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Constant) and node.value in LISTED:  # by getattr, setattr and the like
            names = [node.value]
        for name in names:
            if re.match(r"_[A-Za-z]", name):
                found.setdefault(name, set()).add(file.relative_to(SRC).as_posix())
    return {name: files for name, files in found.items() if name not in own | DOCUMENTED}


@in_one_process
def test_every_private_name_that_is_used_is_listed() -> None:
    listed = {name for owners in ALL_NAMES.values() for owner, names in owners.items() for name in (owner, *names)}
    listed.add("_should_use_torchax_tensor")
    listed |= {part for module in ALL_NAMES for part in module.split(".")}
    assert {name: files for name, files in used().items() if name not in listed} == {}


@in_one_process
def test_private_names_are_used_in_one_file_only_or_where_they_are_listed() -> None:
    elsewhere = {
        f"{file}: {name}"
        for name, files in used().items()
        for file in files - {"boltcutter/internals.py"}
        if name not in IN_PLACE.get(file.removeprefix("boltcutter/").removesuffix(".py"), {})
        if name not in OF_OTHERS.get(file, set())
    }
    assert elsewhere == set()


@pytest.mark.parametrize("file", IN_PLACE)
def test_names_that_are_listed_are_used_with_a_reason(file: str) -> None:
    text = (SRC / "boltcutter" / f"{file}.py").read_text()
    for name, reason in IN_PLACE[file].items():
        assert re.search(rf"\b{name}\b", text), name
        assert reason


def test_there_are_few_private_names() -> None:
    tree = ast.parse((SRC / "boltcutter" / "internals.py").read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert len(functions) < 40
