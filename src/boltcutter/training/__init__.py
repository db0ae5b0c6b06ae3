"""Train, test, report."""
