"""Measure: python scripts/bench.py startup [rounds=5], or batch [words of train.py] for the largest batch that fits"""

import sys
from pathlib import Path

from boltcutter.cli import main

if __name__ == "__main__":
    room = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in ("startup", "batch") else "startup"
    main(Path(__file__).parents[1] / "configs", f"boltcutter.bench.{room}", __doc__ or "")
