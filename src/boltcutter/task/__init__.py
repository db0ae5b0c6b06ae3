"""LightningModules: a model with its loss, metrics and optimizer."""
