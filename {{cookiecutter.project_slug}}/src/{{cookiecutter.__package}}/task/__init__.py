"""Tasks: loss, metrics and optimizer of a model."""
