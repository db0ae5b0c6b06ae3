"""Serve predictions over HTTP: python scripts/serve.py --help"""

from boltcutter.cli.commands import script

if __name__ == "__main__":
    script("serve", __file__)
