"""How fast things are, as ratios measured in one run."""
