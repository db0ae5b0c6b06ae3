"""Modules and data modules as their authors write them, without any import of Boltcutter."""

from pathlib import Path

HERE = Path(__file__).parent / "configs"

DATA = {  # by task; None: the module has its own dataloaders
    "autoencoder": "digits",
    "language": "sequences",
    "finetuning": "digits",
    "gan": "digits",
    "dqn": None,
    "mnist": "mnist",
    "own_loaders": None,
    "vae": "images",
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
PREDICT = DATA.keys() - {"language", "gan", "dqn", "mnist", "simsiam", "vae"}  # have a predict_step


def overrides(name: str) -> list[str]:
    """Return the overrides that select a module and its data."""
    data = DATA[name]
    return [f"task={HERE}/task/{name}.yaml", f"data={HERE}/data/{data}.yaml" if data else "data=null"]
