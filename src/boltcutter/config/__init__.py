"""Compose, check and instantiate configurations."""
