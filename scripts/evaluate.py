"""Evaluate: python scripts/evaluate.py run=<folder> [ckpt=best|last|path] [split=test] [data=…] [key=value …]"""

from pathlib import Path

from boltcutter.cli import main

if __name__ == "__main__":
    main(Path(__file__).parents[1] / "configs", "boltcutter.evaluate", __doc__ or "")
