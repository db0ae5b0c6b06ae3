"""What pictures, tables and further services add to logging."""

from boltcutter.extend import Part, Section

PART = Part(
    name="boltcutter_logging",
    components=("boltcutter_logging.services",),
    moved={"boltcutter.logger.services": "boltcutter_logging.services"},
    section=Section("Pictures and tables", "record.json", "boltcutter_logging.media_section:render"),
    offers={
        "encode_image": "boltcutter_logging.image:encode_image",
        "media_logging": "boltcutter_logging.media_logging:MediaLogging",
        "confusion": "boltcutter_logging.outcome_report:read_confusion",
        "report_outcomes": "boltcutter_logging.outcome_report:read_outcomes",
        "prediction_writer": "boltcutter_logging.outcomes:PredictionWriter",
    },
)
