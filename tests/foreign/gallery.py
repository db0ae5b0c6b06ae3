"""Modules as their authors write them, with their data modules: nothing here knows of Boltcutter."""

from pathlib import Path

HERE = Path(__file__).parent / "configs"

DATA = {  # by task; null: the module has its own loaders
    "autoencoder": "digits",
    "language": "sequences",
    "finetuning": "digits",
    "gan": "digits",
    "dqn": None,
    "mnist": "mnist",
    "own_loaders": None,
    "timm": "digits",
    "glue": "glue",
    "lora": "glue",
    "mpnn": "molecules",
    "forecast": "forecast",
    "segmentation": "masks",
    "multilabel": "labels",
    "simsiam": "views",
}
TESTED = DATA.keys() - {"gan", "dqn"}  # have a test_step
PREDICT = DATA.keys() - {"language", "gan", "dqn", "mnist", "simsiam"}  # have a predict_step


def overrides(name: str) -> list[str]:
    """What selects a module and its data on the command line."""
    data = DATA[name]
    return [f"task={HERE}/task/{name}.yaml", f"data={HERE}/data/{data}.yaml" if data else "data=null"]
