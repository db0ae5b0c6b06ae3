"""Evaluate checkpoints: metrics, tables of what was predicted, and what splits and folds hold."""
