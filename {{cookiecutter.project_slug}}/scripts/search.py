"""Search hyperparameters, or repeat over seeds and folds: python scripts/search.py --help"""

from boltcutter.cli.commands import script

if __name__ == "__main__":
    script("search", __file__)
