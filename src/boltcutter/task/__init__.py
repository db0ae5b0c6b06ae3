"""Tasks: LightningModules that combine a model with a loss, metrics and an optimizer."""
