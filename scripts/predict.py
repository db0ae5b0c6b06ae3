"""Predict: python scripts/predict.py run=<folder> input=<files> [ckpt=best|last|path] [output=predictions.csv]"""

from pathlib import Path

from boltcutter.cli import main

if __name__ == "__main__":
    main(Path(__file__).parents[1] / "configs", "boltcutter.predict", __doc__ or "")
