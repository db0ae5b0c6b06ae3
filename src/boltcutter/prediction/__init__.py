"""Predictions of a run: from files, loaders and texts, by a checkpoint or an export."""
