"""Launch a training on a cluster or in the background: python scripts/launch.py --help"""

from boltcutter.cli.commands import script

if __name__ == "__main__":
    script("launch", __file__)
