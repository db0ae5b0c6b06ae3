"""Which process this is, by the variables that launchers set."""
