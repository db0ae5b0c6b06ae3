"""Acme: a part of Boltcutter in a distribution of its own."""
