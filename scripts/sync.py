"""Upload runs that were logged offline to W&B: python scripts/sync.py --help"""

from boltcutter.cli.commands import script

if __name__ == "__main__":
    script("sync", __file__)
