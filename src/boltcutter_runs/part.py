"""What the overview and the comparison of runs add to Boltcutter."""

from boltcutter.extend import Command, Part

PART = Part(
    name="boltcutter_runs",
    commands={
        "runs": Command(
            "boltcutter_runs.command:main",
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
    },
    references="boltcutter_runs.references:resolve",
    offers={"compare_groups": "boltcutter_runs.comparison:main", "run_names": "boltcutter_runs.references:candidates"},
)
