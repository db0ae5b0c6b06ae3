"""A run once more, step by step: why a step is as it is, and where two runs begin to differ."""
