"""Part: models written in Keras, on its torch backend."""
