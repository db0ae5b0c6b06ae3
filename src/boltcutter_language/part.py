"""What language models add to Boltcutter."""

from boltcutter.extend import Part

PART = Part(
    name="boltcutter_language",
    names={
        "GPT": "boltcutter_language.gpt",
        "LanguageModeling": "boltcutter_language.task",
        "TokenDataModule": "boltcutter_language.tokens",
    },
    components=("boltcutter_language",),
    offers={"generate": "boltcutter_language.generate:generate"},
)
