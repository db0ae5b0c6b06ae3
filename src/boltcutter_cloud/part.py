"""What the launchers of managed clouds add to Boltcutter."""

from boltcutter.extend import Part

PART = Part(
    name="boltcutter_cloud",
    components=("boltcutter_cloud",),
    moved={
        f"{earlier}.{module}": f"boltcutter_cloud.{module}"
        for module in ("aws_batch", "azureml", "ec2", "sagemaker", "vertex")
        for earlier in ("boltcutter.launch", "boltcutter_launch")
    },
)
