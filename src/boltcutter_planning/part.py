"""What trials of a configuration, plans of memory and strategies, and causes of errors add to Boltcutter."""

from boltcutter.extend import Command, Part

CHECK_FLAGS = {"--batch": "also train, validate and test one batch"}
DOCTOR_FLAGS = {"--test": "train on all devices of this machine, and show what works"}
PART = Part(
    name="boltcutter_planning",
    commands={
        "check": Command(
            "boltcutter_planning.check:main",
            """Check a configuration without training: boltcutter check [--batch] [run=<folder>] [overrides of train]

boltcutter check model=mlp trainer.max_epochs=5     # prints ok, or each mistake on a line
boltcutter check --batch model=mlp                  # also trains, validates and tests one batch""",
            flags="boltcutter_planning.part:CHECK_FLAGS",
        ),
        "doctor": Command(
            "boltcutter_planning.doctor:main",
            """Show what works on this machine, and estimate memory: boltcutter doctor [run=<folder>] [train overrides]

boltcutter doctor model=gpt data=text task=language devices=8 memory=80GiB    # which strategy to choose
boltcutter doctor --test""",
            flags="boltcutter_planning.part:DOCTOR_FLAGS",
        ),
        "find-batch-size": Command(
            "boltcutter_planning.batch_size:main",
            "Find the largest batch that fits into memory: boltcutter find-batch-size [limit_gib=…] [train overrides]",
        ),
    },
    callbacks="boltcutter_planning.learning:callbacks",
    offers={
        "check": "boltcutter_planning.check:main",
        "choose_monitor": "boltcutter_planning.monitors:choose_monitor",
        "check_combination": "boltcutter_planning.checks:check_combination",
        "check_kind": "boltcutter_planning.checks:check_kind",
        "check_hardware": "boltcutter_planning.hardware:check_hardware",
        "unusable_gpus": "boltcutter_planning.hardware:unusable_gpus",
        "explain_errors": "boltcutter_planning.failure:explain_errors",
        "flops": "boltcutter_planning.flops",
        "monitor_check": "boltcutter_planning.monitors:MonitorCheck",
        "nonfinite_origin": "boltcutter_planning.nonfinite:find_origin",
    },
)
