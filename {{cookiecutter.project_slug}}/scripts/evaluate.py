"""Evaluate a run's checkpoint: python scripts/evaluate.py --help"""

from boltcutter.cli.commands import script

if __name__ == "__main__":
    script("evaluate", __file__)
