"""Checkpoints: atomic and verified files, sharded ones, selection, weights from elsewhere."""
