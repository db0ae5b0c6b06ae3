"""What Keras models add to Boltcutter."""

from boltcutter.extend import Part

PART = Part(
    name="boltcutter_keras",
    components=("boltcutter_keras",),
    moved={
        "boltcutter.callback.keras_file": "boltcutter_keras.file",
        "boltcutter.model.keras": "boltcutter_keras.model",
        "boltcutter.model.keras_convnet": "boltcutter_keras.convnet",
    },
    offers={
        "adapter.keras": "boltcutter_keras.model:KerasModel",
        "keras_weights": "boltcutter_keras.file:load_weights",
    },
)
