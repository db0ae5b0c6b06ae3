"""Train: python scripts/train.py [group=option …] [key=value …] [+key=value] [~key]

python scripts/train.py model=mlp trainer.max_epochs=5
python scripts/train.py data=mnist trainer=ddp trainer.devices=8
python scripts/train.py callback=[default,ema] optimizer=sgd optimizer.lr=0.05
python scripts/train.py resume=runs/…
python scripts/train.py reproduce=runs/…
"""

from boltcutter.cli import main
from boltcutter.environment.startup import begin
from boltcutter.project import Project

if __name__ == "__main__":
    main(Project.find(__file__), "boltcutter.train", __doc__ or "", begin=begin)
