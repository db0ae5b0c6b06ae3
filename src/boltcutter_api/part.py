"""What functions for Python programs and notebooks add to Boltcutter."""

from boltcutter.extend import Part

FUNCTIONS = ("Loaded", "evaluate", "load", "predict", "train")
PART = Part(
    name="boltcutter_api",
    names=dict.fromkeys(FUNCTIONS, "boltcutter_api.functions"),
)
