"""Check a configuration without training: python scripts/check.py [doctor] [run=<folder>] [the words of train.py]

python scripts/check.py model=mlp trainer.max_epochs=5     # ok, or each mistake on a line
python scripts/check.py doctor                             # what this machine can do, and what the rest needs
python scripts/check.py doctor model=gpt data=text task=language devices=8 memory=80GiB    # which strategy to take
"""

import sys

from boltcutter.cli import main
from boltcutter.project import Project

if __name__ == "__main__":
    part = sys.argv.pop(1) if sys.argv[1:2] == ["doctor"] else "assemble"
    main(Project.find(__file__), f"boltcutter.{part}", __doc__ or "")
