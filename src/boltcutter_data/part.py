"""What data modules, streams, folds, regression and a network for images add to Boltcutter."""

from boltcutter.extend import Part

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
)
