"""Distributed strategies in addition to Lightning's."""
