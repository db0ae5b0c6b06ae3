"""Training with Lightning: every run is checked, traced and resumed."""
