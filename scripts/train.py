"""Train a model: python scripts/train.py --help"""

from boltcutter.cli.commands import script

if __name__ == "__main__":
    script("train", __file__)
