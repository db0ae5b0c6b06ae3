"""Evaluate checkpoints and predict."""
