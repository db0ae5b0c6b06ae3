"""Serve the predictions of a run over HTTP."""
