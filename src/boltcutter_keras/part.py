"""What Keras models add to Boltcutter."""

from boltcutter.extend import Part

PART = Part(
    name="boltcutter_keras",
    components=("boltcutter_keras",),
    offers={
        "adapter.keras": "boltcutter_keras.model:KerasModel",
        "keras_weights": "boltcutter_keras.file:load_weights",
    },
)
