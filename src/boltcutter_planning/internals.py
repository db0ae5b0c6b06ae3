"""Every private name of torch, Lightning and Python that this part uses, besides those of ``boltcutter.internals``.

Unless one is named, torch 2.13 and Lightning 2.6.6 have no public alternative, and all versions that are supported have
the name. ``tests/test_private_names.py`` checks that each is there, and that this part uses no others.
"""

USED = {  # by name: the file that uses it, and why
    "_subclasses": "estimate: FakeTensorMode, in which tensors have no data",
    "_tools": "estimate: MemTracker; fake_collectives, the shapes that collectives return without other ranks",
    "_pre_fw_hook": "estimate: a hook of MemTracker that refuses frozen parameters",
    "_post_fw_hook": "estimate: the same",
    "_pre_bw_hook": "estimate: the same",
    "_post_bw_hook": "estimate: the same",
    "_internal": "estimate: FakeStore, of a process group without other ranks",
    "_run_exitfuncs": "failure: Python's handlers at exit, before a process is ended without finalization",
    "_get_default_store": "failure: still works after a collective has failed, to find out which rank is lost",
    "_C": "hardware: the version of CUDA that the driver supports; builds for CPUs do not have it",
    "_MockOptimizer": "learning: what Lightning trains with if configure_optimizers returned None",
    "_version": "learning: whether a parameter was changed in place",
    "_results": "monitors: means of an unfinished epoch, which callback_metrics does not have",
    "_pytree": "nonfinite: keystr and tree_flatten_with_path name the tensor of a batch; optree is not a dependency",
}
