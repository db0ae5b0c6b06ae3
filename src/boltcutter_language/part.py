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
    moved={
        "boltcutter.data.text": "boltcutter_language.text",
        "boltcutter.data.tokens": "boltcutter_language.tokens",
        "boltcutter.model.gpt": "boltcutter_language.gpt",
        "boltcutter.model.transformer": "boltcutter_language.transformer",
        "boltcutter.task.language": "boltcutter_language.task",
    },
    removed={"boltcutter_language.tokens.Tokens": {"header": 0, "num_folds": None, "fold": ...}},
)
