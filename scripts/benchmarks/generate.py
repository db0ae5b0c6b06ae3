"""Tokens per second with a key-value cache, relative to computing all tokens again for each new one.

256 tokens follow a prompt of 16, greedily, on one thread by default: by the checkpoint (``eager``) and by exports of a
``gpt`` with a context of 512 tokens. Both generate in turns in one process.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import ROOT, TRAIN, BenchmarkError, Process, ratio_of_turns
from boltcutter.assembly.overrides import load_evaluation_config
from boltcutter.environment.warning_filters import filter_warnings
from boltcutter.export.serving.predictor import Predictor
from boltcutter.project import Project

CONTEXT, PROMPT, TOKENS, TARGET = 512, 16, 256, 5.0
EXACT = ("eager", "onnx", "torch")  # rounding differs too little to change a token
WORK = "eager,onnx,int8-static,int4,torch"


def main(project: Project, overrides: list[str]) -> None:
    """Measure; options: ``work=eager,onnx,int8-static,int4,torch threads=1 rounds=5 folder=runs/bench``.

    Raises:
        BenchmarkError: A process failed, or the tokens depend on the cache.
    """
    chosen = harness.parse_options(overrides, {"work": WORK, "threads": "1", "rounds": "5", "folder": "runs/bench"})
    cores, work = harness.cores(int(chosen["threads"])), chosen["work"].split(",")
    filter_warnings()
    torch.set_num_threads(len(cores))
    speed: dict[str, dict[bool, list[float]]] = {name: {True: [], False: []} for name in work}
    same: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "run")
        train = [str(TRAIN), "model=gpt", "task=language", "data=text", f"data.path={ROOT}/docs/*.md"]
        train += [f"data.shape=[{CONTEXT}]", f"data.cache_dir={scratch}/text", "optimizer.lr=0.01", f"folder={folder}"]
        train += ["trainer.max_steps=30", "trainer.accelerator=cpu", "logger=null", "test=false", "report=false"]
        Process(train, cores).wait()
        formats = [name for name in work if name != "eager"]
        export = [str(TRAIN.parent / "export.py"), f"run={folder}", f"export=[{','.join(formats)}]"]
        if formats:
            Process([*export, "export.max_drop=100"], cores).wait()
        cfg, _ = load_evaluation_config(project, {"run": str(folder)}, [])
        predictors = {name: Predictor(cfg, folder, "last", None if name == "eager" else name) for name in work}
        for _ in range(int(chosen["rounds"])):
            for name, predictor in predictors.items():
                tokens = {}
                for use_cache in (True, False):
                    tokens[use_cache], seconds = generate(predictor.task, use_cache)
                    speed[name][use_cache].append(TOKENS / seconds)
                same[name] = statistics.mean(a == b for a, b in zip(*tokens.values(), strict=True))
                if same[name] < 1 and name in EXACT:
                    raise BenchmarkError(f"{name}: {same[name]:.0%} of the tokens are the same with the cache")
    ratios = []
    for name, found in speed.items():
        cached, without = ([[rate] for rate in found[key]] for key in (True, False))
        ratios.append(ratio_of_turns(f"tokens with cache, {name}", cached, "without", without, TARGET, least=True))
    rates = {name: {"with": found[True], "without": found[False]} for name, found in speed.items()}
    harness.report("generate", Path(chosen["folder"]), ratios, {"tokens_per_second": rates, "same_tokens": same})


def generate(task: Any, use_cache: bool) -> tuple[list[int], float]:
    """Tokens that follow the prompt, and the time in seconds."""
    task.model.supports_cache = use_cache
    prompt = torch.tensor(list(b"# Serve predictions over HTTP"[:PROMPT]))
    list(task.generate(prompt, 2, temperature=0))  # warm-up
    begin = time.perf_counter()
    tokens = list(task.generate(prompt, TOKENS, temperature=0))
    return tokens, time.perf_counter() - begin
