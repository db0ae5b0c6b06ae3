"""Train: python scripts/train.py [group=option …] [key=value …] [+key=value] [~key]

python scripts/train.py trainer.max_epochs=5 optimizer.lr=1e-3
python scripts/train.py trainer=ddp trainer.devices=8 logger=wandb
python scripts/train.py resume=runs/…
"""

from pathlib import Path

from boltcutter.cli import main

if __name__ == "__main__":
    main(Path(__file__).parents[1] / "configs", __doc__ or "")
