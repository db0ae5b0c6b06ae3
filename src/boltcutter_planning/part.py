"""What the planning of memory, strategies and batch sizes, and the causes of errors, add to Boltcutter."""

from boltcutter.extend import Command, Part

DOCTOR_FLAGS = {"--test": "train on all devices of this machine, and show what works"}
PART = Part(
    name="boltcutter_planning",
    commands={
        "doctor": Command(
            "boltcutter_planning.doctor:main",
            """Show what works on this machine, and estimate memory: boltcutter doctor [run=<folder>] [train overrides]

boltcutter doctor model=gpt data=text task=language devices=8 memory=80GiB    # which strategy to choose
boltcutter doctor --test""",
            flags="boltcutter_planning.part:DOCTOR_FLAGS",
        ),
        "find-batch-size": Command(
            "boltcutter_planning.batch_size:main",
            "Find the largest batch that fits into memory: boltcutter find-batch-size [overrides of train]",
        ),
    },
    names={"Profile": "boltcutter_planning.profile"},
    components=("boltcutter_planning.profile",),
    moved={"boltcutter.callback.profile": "boltcutter_planning.profile"},
    offers={
        "explain_errors": "boltcutter_planning.failure:explain_errors",
        "flops": "boltcutter_planning.flops",
        "learning_check": "boltcutter_planning.learning:LearningCheck",
        "monitor_check": "boltcutter_planning.monitors:MonitorCheck",
        "nonfinite_origin": "boltcutter_planning.nonfinite:find_origin",
        "report_missing": "boltcutter_planning.guarantees:report_missing",
    },
)
