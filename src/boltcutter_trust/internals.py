"""Every private name of torch that this part uses, besides those of ``boltcutter.internals``.

torch 2.13 has no public alternative, and all versions that are supported have the name. ``tests/test_private_names.py``
checks that each is there, and that this part uses no others.
"""

USED = {  # by name: the file that uses it, and why
    "_open_zipfile_reader": "unpickle: torch.load would take another unpickler",
    "_load": "unpickle: the same",
    "_weights_only_unpickler": "unpickle: has _get_allowed_globals",
    "_get_allowed_globals": "unpickle: what weights_only=True allows, of which no more is allowed here",
    "_tensor_classes": "unpickle: those of legacy formats",
    "_storage_classes": "unpickle: storages are only referred to",
}
