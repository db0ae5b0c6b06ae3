"""What judges records and checkpoints of somebody else adds to Boltcutter."""

from boltcutter.extend import Part

PART = Part(
    name="boltcutter_trust",
    offers={"judge_record": "boltcutter_trust.record:judge", "unpickler": "boltcutter_trust.unpickle"},
)
