"""What programs and agents need of Boltcutter."""

from boltcutter.extend import Command, Part

PART = Part(
    name="boltcutter_machine",
    commands={
        "mcp": Command(
            "boltcutter_machine.server:main",
            "Serve tools for agents by the Model Context Protocol, over standard input and output: boltcutter mcp",
            is_plain=True,
        ),
        "schema": Command(
            "boltcutter_machine.schema:main",
            "Write JSON Schemas of configuration files, by which editors complete and check them: boltcutter schema",
        ),
    },
    offers={
        "answer": "boltcutter_machine.answer:answer",
        "complete": "boltcutter_machine.completion:print_candidates",
        "completion": "boltcutter_machine.completion:completion",
        "describe": "boltcutter_machine.describe:print_keys",
        "own_arguments": "boltcutter_machine.own_arguments:suggest_own_arguments",
    },
)
