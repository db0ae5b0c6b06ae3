"""Bring runs that were logged offline up to W&B: python scripts/sync.py run=<folder> [run=<folder> …]"""

from pathlib import Path

from boltcutter.cli import main

if __name__ == "__main__":
    main(Path(__file__).parents[1] / "configs", "boltcutter.logger.sync", __doc__ or "")
