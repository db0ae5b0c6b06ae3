"""Launch: python scripts/launch.py launch=slurm [the arguments of train.py], or status|logs|cancel run=<folder>"""

from boltcutter.project import Project

from boltcutter.cli import main
from boltcutter.launch.command import FLAGS

if __name__ == "__main__":
    main(Project.find(__file__), "boltcutter.launch.command", __doc__, own=FLAGS)
