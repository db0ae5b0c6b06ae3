"""Train: python scripts/train.py experiment=baseline [group=option …] [key=value …]"""

from boltcutter.project import Project

from boltcutter.cli import main
from boltcutter.environment.startup import begin

if __name__ == "__main__":
    main(Project.find(__file__), "boltcutter.train", __doc__, begin=begin)
