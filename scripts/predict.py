"""Predict: python scripts/predict.py run=<folder> input=<files> [ckpt=best|last|path] [output=predictions.csv]"""

from boltcutter.cli import main
from boltcutter.project import Project

if __name__ == "__main__":
    main(Project.find(__file__), "boltcutter.predict", __doc__ or "")
