"""The launch environment: ranks, run identity, signals, and the lease of a run folder."""
