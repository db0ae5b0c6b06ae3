"""Run benchmarks: python scripts/bench.py step|scaling|startup|memory|loader|all [folder=runs/bench] [key=value …]

step      training step, relative to reference loops: [work=mlp,convnet,resnet,gpt] [threads=1,2] [clock=bytecode]
scaling   two data-parallel processes, relative to two independent runs
startup   first training step, relative to the import of Lightning
memory    peak memory, relative to hand-written loops
loader    training loaders, relative to NumPy indexing
parts     cost of each feature per training step: [work=mlp]
all       all of the above except parts, in less than half an hour
strategy  final weights and speed of each strategy, relative to one process: [epochs=3]
precision accuracy and speed of each precision, relative to 32 bits: [epochs=5]
scale     growth of time and memory with samples, tokens, files, parameters, metrics, runs and ranks: [work=samples]
search    trainings by a search, relative to a shell loop, and cost per trial: [work=trainings,trials] [trials=1000]
save      time that training waits for an asynchronous save: [mib=512] [device=cpu]
serve     requests of 32 clients, relative to calling the model in a loop: [work=resnet,convnet]
trust     CPU seconds that the checks of untrusted files add
runs      cost of runs --live to a training that it follows: [asks=100] [seconds=180]
generate  tokens per second with a key-value cache, relative to none: [work=eager,onnx,int8-static,int4,torch]
"""

import sys

from boltcutter.cli.main import dispatch_command
from boltcutter.environment.output import ignore_lost_readers
from boltcutter.extend import Command
from boltcutter.project import Project

if __name__ == "__main__":
    ignore_lost_readers()
    name = sys.argv.pop(1) if len(sys.argv) > 1 and f"\n{sys.argv[1]} " in __doc__ else "all"
    dispatch_command(Project.find(__file__), Command(f"benchmarks.{name}:main", __doc__))
