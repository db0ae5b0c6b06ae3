"""What data modules, streams, folds, and a network for images, add to Boltcutter."""

from boltcutter.extend import Part

MODULES = ("arrow", "augment", "huggingface", "images", "mnist", "shards", "synthetic", "tabular")
PART = Part(
    name="boltcutter_data",
    names={"Augment": "boltcutter_data.augment", "ResNet": "boltcutter_data.resnet"},
    components=("boltcutter_data",),
    offers={
        "folds": "boltcutter_data.folds",
        "iterable_loader": "boltcutter_data.iterable:IterableLoader",
        "read_images": "boltcutter_data.image_io:read_images",
        "stream": "boltcutter_data.stream:Stream",
    },
    moved={
        **{f"boltcutter.data.{module}": f"boltcutter_data.{module}" for module in MODULES},
        "boltcutter.model.resnet": "boltcutter_data.resnet",
    },
)
