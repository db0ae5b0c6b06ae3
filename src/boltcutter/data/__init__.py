"""LightningDataModules, and who sees which sample when."""
