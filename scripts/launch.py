"""Launch: python scripts/launch.py launch=slurm|local [the words of train.py]

python scripts/launch.py launch=slurm trainer.num_nodes=2 trainer.devices=8 launch.time=2:00:00
python scripts/launch.py launch=slurm launch.array='seed=1,2,3;optimizer.lr=0.1,0.01'
python scripts/launch.py launch=slurm resume=runs/…
python scripts/launch.py status|logs|cancel run=runs/…
python scripts/launch.py list
"""

from boltcutter.cli import main
from boltcutter.launch.command import FLAGS
from boltcutter.project import Project

if __name__ == "__main__":
    main(Project.find(__file__), "boltcutter.launch.command", __doc__ or "", own=FLAGS)
