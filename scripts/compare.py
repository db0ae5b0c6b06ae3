"""Compare two runs, bit by bit: python scripts/compare.py --help"""

from boltcutter.cli.commands import script

if __name__ == "__main__":
    script("compare", __file__)
