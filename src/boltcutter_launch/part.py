"""What launchers add to Boltcutter."""

from boltcutter.extend import Command, Part

PART = Part(
    name="boltcutter_launch",
    commands={
        "launch": Command(
            "boltcutter_launch.command:main",
            """Train in the background, on a cluster or in a cloud: boltcutter launch launch=<option> [train overrides]

boltcutter launch launch=slurm trainer.num_nodes=2 trainer.devices=8 launch.time=2:00:00
boltcutter launch launch=slurm launch.array='seed=1,2,3;optimizer.lr=0.1,0.01'
boltcutter launch launch=slurm resume=runs/…
boltcutter launch status|logs|cancel run=runs/…
boltcutter launch list""",
            flags="boltcutter_launch.command:FLAGS",
            resolves_runs=False,  # a job works at the URL
        ),
    },
    groups=("launch",),
    names={
        "Job": "boltcutter_launch.job",
        "Launcher": "boltcutter_launch.job",
        "LocalLauncher": "boltcutter_launch.local",
        "SlurmLauncher": "boltcutter_launch.slurm",
        "Status": "boltcutter_launch.job",
    },
    components=("boltcutter_launch",),
    callbacks="boltcutter_launch.transport:callbacks",
    ranks="boltcutter_launch.platform:read_ranks",
    offers={"check_tasks": "boltcutter_launch.slurm_tasks:check"},
)
