"""The commands that create and change projects, and help for users of other templates."""

from boltcutter.extend import Command, Part

PART = Part(
    name="boltcutter_scaffold",
    commands={
        "new": Command(
            "boltcutter_scaffold.new:main",
            "Create a project: boltcutter new <name> [folder=.] [author=<name>] [license=MIT] [vendor=false] "
            "[template=<URL or folder>]",
            is_plain=True,
        ),
        "add": Command(
            "boltcutter_scaffold.add:main",
            "Add a component to the project: boltcutter add model|data|task|callback|launch|experiment <name> "
            "[--kind regression|sequence|text|image]",
            is_plain=True,
        ),
        "import": Command(
            "boltcutter_scaffold.port:main",
            "Import a project of lightning-hydra-template or Lightning CLI: boltcutter import <folder> "
            "[--from lht|cli]",
            is_plain=True,
        ),
        "vendor": Command(
            "boltcutter_scaffold.vendor:main",
            "Copy the core, a part or one component into the project: boltcutter vendor "
            "[core|<part, such as launch>|<component, such as callback.guard>] [--undo]",
            is_plain=True,
        ),
    },
    components=("boltcutter_scaffold.configured",),
    offers={
        "lightning_alias": "boltcutter_scaffold.lightning_alias:install",
        "other_templates": "boltcutter_scaffold.foreign",
        "translate_arguments": "boltcutter_scaffold.translate:translate",
    },
)
