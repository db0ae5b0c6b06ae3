"""What Acme adds to Boltcutter."""

from boltcutter.extend import Command, Part, Section

PART = Part(
    name="acme",
    commands={
        "slowest": Command(
            "acme.slowest:main",
            """Show the slowest steps of a run: boltcutter slowest run=<folder> [count=3]

boltcutter slowest run=runs/… count=10""",
        )
    },
    callbacks="acme.step_times:for_each_run",
    section=Section("Slowest steps", "step_times.csv", "acme.slowest:render"),
)
