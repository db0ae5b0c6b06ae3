"""What runs on object storage add to Boltcutter."""

from boltcutter.extend import Part

PART = Part(name="boltcutter_remote", offers={"run_store": "boltcutter_remote.store:ObjectStorage"})
