"""What data modules, streams, folds, regression and a network for images add to Boltcutter."""

from boltcutter.extend import Part

MODULES = ("arrow", "augment", "huggingface", "images", "mnist", "shards", "synthetic", "tabular")
PART = Part(
    name="boltcutter_data",
    names={
        "Augment": "boltcutter_data.augment",
        "Regression": "boltcutter_data.regression",
        "ResNet": "boltcutter_data.resnet",
    },
    components=("boltcutter_data",),
    offers={
        "folds": "boltcutter_data.folds",
        "iterable_loader": "boltcutter_data.iterable:IterableLoader",
        "loader_preparation": "boltcutter_data.foreign_loader:LoaderPreparation",
        "permute": "boltcutter_data.permutation:permute",
        "read_images": "boltcutter_data.image_io:read_images",
    },
    moved={
        **{f"boltcutter.data.{module}": f"boltcutter_data.{module}" for module in MODULES},
        "boltcutter.model.resnet": "boltcutter_data.resnet",
        "boltcutter.task.regression": "boltcutter_data.regression",
    },
    removed={
        "boltcutter_data.augment.Augment": {"rotate": 0, "erase": 0},
        "boltcutter_data.images.Images": {"group": None},
        "boltcutter_data.resnet.ResNet": {"mean": None, "std": None, "zero_init_residual": True},
        "boltcutter_data.shards.Shards": {"num_folds": None, "fold": ..., "group": None},
    },
)
