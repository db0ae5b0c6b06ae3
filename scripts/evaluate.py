"""Evaluate: python scripts/evaluate.py run=<folder> [ckpt=best|last|path] [split=test] [data=…] [key=value …]"""

from boltcutter.cli import main
from boltcutter.project import Project

if __name__ == "__main__":
    main(Project.find(__file__), "boltcutter.evaluate", __doc__ or "")
