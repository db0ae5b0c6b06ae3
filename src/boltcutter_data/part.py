"""What data modules, loaders of other libraries, streams, folds, and a network for images, add to Boltcutter."""

from boltcutter.extend import Part

MODULES = ("arrow", "augment", "huggingface", "images", "mnist", "shards", "synthetic", "tabular")
PART = Part(
    name="boltcutter_data",
    names={"Augment": "boltcutter_data.augment", "ResNet": "boltcutter_data.resnet"},
    components=("boltcutter_data",),
    offers={
        "folds": "boltcutter_data.folds",
        "iterable_loader": "boltcutter_data.iterable:IterableLoader",
        "loader_preparation": "boltcutter_data.foreign_loader:LoaderPreparation",
        "read_images": "boltcutter_data.image_io:read_images",
    },
    moved={
        **{f"boltcutter.data.{module}": f"boltcutter_data.{module}" for module in MODULES},
        "boltcutter.model.resnet": "boltcutter_data.resnet",
    },
)
