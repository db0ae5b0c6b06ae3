"""The table of commands: what each calls, and what its help says first."""

from __future__ import annotations

from collections.abc import Mapping

from boltcutter import extend
from boltcutter.extend import Command, PartError

OVERRIDES = "[group=option …] [key=value …] [+key=value] [~key]"

COMMANDS: Mapping[str, Command] = {
    "train": Command(
        "boltcutter.training.train:train_command",
        f"""Train a model: boltcutter train {OVERRIDES}

boltcutter train model=mlp trainer.max_epochs=5
boltcutter train data=mnist trainer=ddp trainer.devices=8
boltcutter train callback=[default,ema] optimizer=sgd optimizer.lr=0.05
boltcutter train resume=runs/…
boltcutter train reproduce=runs/…""",
        begin="boltcutter.environment.startup:begin",
    ),
    "evaluate": Command(
        "boltcutter.evaluation.evaluate:evaluate_command",
        "Evaluate a run: boltcutter evaluate run=<folder> [ckpt=best|last|path] [split=test|all|…] [data=…] "
        "[key=value …]",
    ),
    "predict": Command(
        "boltcutter.prediction.predict:predict_command",
        """Predict from files: boltcutter predict run=<folder> input=<files> [ckpt=best|last|path] [output=<file>]

boltcutter predict run=runs/… input=measurements.csv export=onnx        # by an exported file
boltcutter predict run=runs/… input='Once upon' tokens=100 temperature=0.8 top_k=50 seed=0    # continues a text""",
    ),
    "compare": Command(
        "boltcutter.run.compare:compare_command",
        """Compare two runs bit by bit: boltcutter compare <run> <run> [ckpt=last|best|<name>]

boltcutter compare run=<folder> with=<folder>       # the same

boltcutter compare --metric test/accuracy model=mlp model=resnet    # is the second group better, or was it luck?
    group            a filter of boltcutter runs, the name or folder of a run, or the folder of runs or of a search
    --mode=min|max   which values are better; by default by the metric's name
    --effect=<size>  smallest difference that matters, in units of the metric
    --html=<file>    a page with the samples that changed sides""",
        by_flag={"--metric": "boltcutter.analysis.comparison:compare_groups_command"},
    ),
    "try": Command(
        "boltcutter.tries.command:try_command",
        """Accept or reject a change in pairs of runs: boltcutter try <overrides, git ref or patch> metric=… effect=…

boltcutter try optimizer.lr=0.005 metric=val/accuracy effect=0.5%           # against the default configuration
boltcutter try model.dropout=0.1 against='model=mlp trainer.max_epochs=5' metric=val/loss effect=0.01
boltcutter try --confirm                                # all that was accepted together, on fresh seeds
boltcutter try faster-mixup against=baseline metric=val/accuracy effect=0.5%    # a branch, against runs with this tag
    against=         the baseline: overrides, a run, a tag of runs, a git ref or patch
    effect=          smallest improvement worth having: in units of the metric, or in percent of the baseline's value
    budget=12        most pairs of runs, 5 to 20
    margin=0         what an improvement has to exceed
    not_worse=       metrics that must not get worse, with a tolerance: time/step:2%,val/loss:0.01
    mode=min|max     which values are better; by default by the metric's name
    split=by-seed|fixed    a split of the data for each pair, or one for all; by default as configured
    parallel=1 gpus=       runs at a time on this machine, and GPUs of each
    launch=slurm launch.…  as jobs, by default ten at a time
Exit status: 0 accepted, 1 rejected, 3 undecided. The same command continues one that was interrupted.""",
        flags="boltcutter.tries.question:FLAGS",
        runs=(),
        is_local=False,
    ),
    "why": Command(
        "boltcutter.replay.why:why_command",
        """Say why a step is as it is: boltcutter why run=<folder> [step=<n>|spike|nonfinite|error|last] [html=<file>]

boltcutter why run=latest            # the first step that is not finite, or else the largest spike, or the last step
boltcutter why run=latest step=120   # replays it, and names a cause only if removing it removes the effect
boltcutter why run=latest --hang     # where each rank of a run that does not go on is, while it goes on""",
        by_flag={"--hang": "boltcutter.analysis.hang:print_hang"},
    ),
    "bisect": Command(
        "boltcutter.replay.bisection:bisect_command",
        """Say where and why two runs begin to differ: boltcutter bisect <run> <run> [--python-a=…] [--python-b=…]

boltcutter bisect run=<folder> with=<folder>         # the same
boltcutter bisect runs/… latest      # replays both up to the first step that differs: sample, module, gradient, update
    --python-a= --python-b=   interpreters of the environments with which they are replayed
    timeout=<seconds>         after which a replay is ended""",
    ),
    "golden": Command(
        "boltcutter.replay.golden:golden_command",
        """Keep the steps of a short run as a test: boltcutter golden run=<folder> [name=…] [tolerance.<column>=…]

boltcutter golden run=latest name=baseline           # tests/golden/baseline.ledger; boltcutter.check_golden compares
boltcutter golden run=latest tolerance.loss=1e-4     # relative; also of gradient_norm and lr""",
        runs=("run",),
    ),
    "tries": Command(
        "boltcutter.tries.listing:tries_command",
        "List the changes that were tried, and their verdicts: boltcutter tries [runs=<folder>] [--json]",
        is_plain=True,
    ),
    "runs": Command(
        "boltcutter.analysis.command:runs_command",
        """List runs: boltcutter runs ['<filter>'] [--sort <key>] [--columns <a,b>] [--limit <n>] [--json] [--csv]

boltcutter runs                                           # the newest; settings that differ, best and test metrics
boltcutter runs 'val/accuracy>0.98 and model=resnet and age<7d' --sort test/accuracy
boltcutter runs tag 'seed=1' baseline                     # also untag, and: note <run> <text>
boltcutter runs remove 'status=failed and age>30d'        # asks; --yes does not; this cannot be undone
boltcutter runs archive latest                            # restore <run> undoes it; --archived lists these
boltcutter runs --html                                    # runs.html: the table, curves, parallel coordinates
boltcutter runs --live                                    # serves this page, which follows the runs: host=… port=…
boltcutter runs runs=s3://bucket/runs                     # another folder, or object storage

A run is an id, the beginning of one, latest, or best:<metric>; so it is in run=, resume=, reproduce= and with=.""",
        is_plain=True,
    ),
    "info": Command(
        "boltcutter.analysis.checkpoint:info_command",
        "Show which run and code made a checkpoint: boltcutter info run=<folder> [ckpt=best|last|path], or ckpt=<file>",
        runs=("run",),
    ),
    "search": Command(
        "boltcutter.search.command:search_command",
        """Search hyperparameters, or repeat over seeds and folds: boltcutter search search=… [overrides of train]

boltcutter search search=optuna search.space.optimizer.lr='loguniform(1e-4, 1e-1)'
boltcutter search search=asha experiment=mnist search.num_trials=50
boltcutter search search=optuna budget=30m                          # ends after 30 minutes
boltcutter search search=kfold search.folds=10
boltcutter search resume=runs/…""",
        flags="boltcutter.search.command:FLAGS",
        config="boltcutter.search.plan:read_config",
        runs=("resume",),
        is_local=False,  # trials resolve their own
    ),
    "launch": Command(
        "boltcutter.launch.command:launch_command",
        """Train in the background, on a cluster or in a cloud: boltcutter launch launch=<option> [train overrides]

boltcutter launch launch=slurm trainer.num_nodes=2 trainer.devices=8 launch.time=2:00:00
boltcutter launch launch=slurm launch.array='seed=1,2,3;optimizer.lr=0.1,0.01'
boltcutter launch launch=slurm resume=runs/…
boltcutter launch status|logs|cancel run=runs/…
boltcutter launch list""",
        flags="boltcutter.launch.command:FLAGS",
        runs=("run", "resume"),  # other values are those of the job
        is_local=False,  # a job works at the URL
    ),
    "check": Command(
        "boltcutter.planning.check:check_command",
        """Check a configuration without training: boltcutter check [--batch] [run=<folder>] [overrides of train]

boltcutter check model=mlp trainer.max_epochs=5     # prints ok, or each mistake on a line
boltcutter check --batch model=mlp                  # also trains eight steps: what is silently wrong""",
        flags="boltcutter.planning.flags:CHECK_FLAGS",
    ),
    "audit": Command(
        "boltcutter.planning.audit:audit_command",
        """Say what is silently wrong in module and data: boltcutter audit [run=<folder>] [overrides of train]

boltcutter audit model=mlp                          # eight steps, altered batches, all splits, baselines
boltcutter audit run=runs/… ckpt=best               # of a run, whose model is compared with the baselines
boltcutter audit script.py:Module script.py:Data    # of any Lightning script, without a configuration""",
    ),
    "doctor": Command(
        "boltcutter.planning.doctor:doctor_command",
        """Show what works on this machine, and estimate memory: boltcutter doctor [run=<folder>] [train overrides]

boltcutter doctor model=gpt data=text task=language devices=8 memory=80GiB    # which strategy to choose
boltcutter doctor --test""",
        flags="boltcutter.planning.flags:DOCTOR_FLAGS",
    ),
    "bench": Command(
        "boltcutter.planning.bench:bench_command",
        """Measure how fast this machine trains, beside hand-written loops: boltcutter bench [seconds=240] [work=…]

boltcutter bench                     # a convnet, ResNet-50 and a GPT, and doctor --test: a table and, with --json, JSON
boltcutter bench work=resnet50 seconds=60""",
        is_plain=True,
    ),
    "find-batch-size": Command(
        "boltcutter.planning.batch_size:find_batch_size_command",
        "Find the largest batch that fits into memory: boltcutter find-batch-size [limit_gib=…] [train overrides]",
    ),
    "export": Command(
        "boltcutter.export.command:export_command",
        """Export a model: boltcutter export run=<folder> export=<formats> [ckpt=best|last|path] [key=value …]

boltcutter export run=runs/… export=onnx
boltcutter export run=runs/… export=[torch,int8,int4] export.max_drop=1    # several, which may lose one point""",
    ),
    "serve": Command(
        "boltcutter.export.serving.server:serve_command",
        """Serve predictions over HTTP: boltcutter serve run=<folder> [ckpt=best|last|path] [export=format or file]

boltcutter serve run=runs/… port=8000 workers=2
boltcutter serve run=runs/… host=0.0.0.0 token_file=token      # reachable from other machines
    limits: max_batch= max_wait= max_waiting= max_samples= max_bytes= max_total_bytes= max_tokens= max_streams=
        timeout= drain=, in seconds""",
        begin="boltcutter.export.serving.batching:begin",
    ),
    "new": Command(
        "boltcutter.scaffold.new:new_command",
        "Create a project: boltcutter new <name> [folder=.] [author=<name>] [license=MIT] [vendor=false] "
        "[template=<URL or folder>]",
        is_plain=True,
    ),
    "add": Command(
        "boltcutter.scaffold.add:add_command",
        "Add a component to the project: boltcutter add model|data|task|callback|launch|experiment <name> "
        "[--kind regression|sequence|text|image|ragged]",
        is_plain=True,
    ),
    "import": Command(
        "boltcutter.scaffold.port:import_command",
        "Import a project of lightning-hydra-template or Lightning CLI: boltcutter import <folder> [--from lht|cli] "
        "[--config <file> …] [its overrides]",
        is_plain=True,
    ),
    "vendor": Command(
        "boltcutter.scaffold.vendor:vendor_command",
        "Copy the library, or one of its components, into the project: boltcutter vendor "
        "[<component, such as callback.guard>] [--undo]",
        is_plain=True,
    ),
    "sync": Command(
        "boltcutter.analysis.sync:sync_command",
        "Upload runs that were logged offline to W&B: boltcutter sync run=<folder> [run=<folder> …]",
    ),
    "schema": Command(
        "boltcutter.cli.schema:schema_command",
        "Write JSON Schemas of configuration files, by which editors complete and check them: boltcutter schema",
    ),
    "mcp": Command(
        "boltcutter.cli.mcp_server:mcp_command",
        "Serve tools for agents by the Model Context Protocol, over standard input and output: boltcutter mcp "
        "[max_runs=200] [max_runs_per_hour=30]",
        is_plain=True,
    ),
}


def commands() -> dict[str, Command]:
    """The commands of the library and of all parts, by name.

    Raises:
        PartError: A part cannot be imported, or has a command of the library.
    """
    found = extend.commands()
    if both := COMMANDS.keys() & found.keys():
        raise PartError(f"{min(both)}: a command of the library, and of an installed part; uninstall the part")
    return {**COMMANDS, **found}
