"""What the launchers of managed clouds add to Boltcutter."""

from boltcutter.extend import Part

PART = Part(
    name="boltcutter_cloud",
    components=("boltcutter_cloud",),
)
