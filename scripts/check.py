"""Check a configuration without training: python scripts/check.py [the words of train.py]"""

from pathlib import Path

from boltcutter.cli import main

if __name__ == "__main__":
    main(Path(__file__).parents[1] / "configs", "boltcutter.assemble", __doc__ or "")
