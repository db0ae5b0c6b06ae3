"""Compare two runs, to the bit: python scripts/compare.py run=<folder> with=<folder> [ckpt=last|best|<name>]"""

from boltcutter.cli import main
from boltcutter.project import Project

if __name__ == "__main__":
    main(Project.find(__file__), "boltcutter.compare", __doc__ or "")
