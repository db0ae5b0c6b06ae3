"""Compare two runs, to the bit: python scripts/compare.py run=<folder> with=<folder> [ckpt=last|best|<name>]"""

from pathlib import Path

from boltcutter.cli import main

if __name__ == "__main__":
    main(Path(__file__).parents[1] / "configs", "boltcutter.compare", __doc__ or "")
