"""Export a trained model: python scripts/export.py --help"""

from boltcutter.cli.commands import script

if __name__ == "__main__":
    script("export", __file__)
