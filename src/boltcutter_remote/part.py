"""What runs on object storage, and uploads to W&B, add to Boltcutter."""

from boltcutter.extend import Command, Part

PART = Part(
    name="boltcutter_remote",
    commands={
        "sync": Command(
            "boltcutter_remote.sync:main",
            "Upload runs that were logged offline to W&B: boltcutter sync run=<folder> [run=<folder> …]",
        )
    },
    offers={"run_store": "boltcutter_remote.store:ObjectStorage"},
)
