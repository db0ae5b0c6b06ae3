"""What is logged and shown besides ``metrics.csv``: speed, progress, pictures and tables, services; how it resumes."""

from boltcutter.extend import Command, Part, Section

CALLBACKS = ("progress", "recompiles", "throughput")

PART = Part(
    name="boltcutter_logging",
    commands={
        "sync": Command(
            "boltcutter_logging.sync:main",
            "Upload runs that were logged offline to W&B: boltcutter sync run=<folder> [run=<folder> …]",
        )
    },
    names={
        "Progress": "boltcutter_logging.progress",
        "ThroughputMonitor": "boltcutter_logging.throughput",
        "WandbLogger": "boltcutter_logging.wandb",
    },
    components=tuple(f"boltcutter_logging.{module}" for module in (*CALLBACKS, "services", "wandb")),
    section=Section("Pictures and tables", "record.json", "boltcutter_logging.media:render"),
    offers={
        "encode_image": "boltcutter_logging.pixels:encode_image",
        "media_logging": "boltcutter_logging.media_logging:MediaLogging",
        "confusion": "boltcutter_logging.outcome_report:read_confusion",
        "report_outcomes": "boltcutter_logging.outcome_report:read_outcomes",
        "predict_loader": "boltcutter_logging.predict_loader:predict_loader",
        "prediction_writer": "boltcutter_logging.outcomes:PredictionWriter",
        "resume_state": "boltcutter_logging.resume_state:ResumeState",
    },
)
