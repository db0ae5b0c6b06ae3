"""Bring runs that were logged offline up to W&B: python scripts/sync.py run=<folder> [run=<folder> …]"""

from boltcutter.cli import main
from boltcutter.project import Project

if __name__ == "__main__":
    main(Project.find(__file__), "boltcutter.logger.sync", __doc__ or "")
