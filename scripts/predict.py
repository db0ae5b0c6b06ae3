"""Predict with a trained model: python scripts/predict.py --help"""

from boltcutter.cli.commands import script

if __name__ == "__main__":
    script("predict", __file__)
