"""Check a configuration, or what works on this machine: python scripts/check.py --help"""

from boltcutter.cli.commands import script

if __name__ == "__main__":
    script("check", __file__)
