"""Accept or reject a change against a baseline, in pairs of runs: ``boltcutter try`` and ``boltcutter tries``."""
