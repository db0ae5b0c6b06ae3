"""Evaluate: python scripts/evaluate.py run=<folder> [ckpt=best|last|path] [split=test] [key=value …]"""

from boltcutter.project import Project

from boltcutter.cli import main

if __name__ == "__main__":
    main(Project.find(__file__), "boltcutter.evaluate", __doc__)
