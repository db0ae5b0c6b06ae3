"""Training, evaluation and prediction from Python."""
