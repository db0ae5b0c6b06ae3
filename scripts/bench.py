"""Measure: python scripts/bench.py step|scaling|startup|memory|loader|all [folder=runs/bench] [key=value …]

step      a training step, over hand-written loops: [work=mlp,convnet,resnet,gpt] [threads=1,2] [rounds=n] [clock=cpu]
scaling   two processes, over two runs at the same time
startup   the first training step, over the import of Lightning
memory    the peak, over hand-written loops
loader    batches, over NumPy's indexing
parts     what each part costs at a step, in processor time: [work=mlp]
all       all but the parts, in under half an hour
strategy  weights and speed of each strategy, over one process: [epochs=3]
precision accuracy and speed of each precision, over 32 bits: [epochs=5]
batch     the largest batch that fits into memory: [words of train.py]
"""

import sys

from boltcutter.cli import main
from boltcutter.project import Project

if __name__ == "__main__":
    parts = ("step", "scaling", "startup", "memory", "loader", "parts", "all", "batch", "strategy", "precision")
    room = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in parts else "all"
    main(Project.find(__file__), f"boltcutter.bench.{room}", __doc__ or "")
