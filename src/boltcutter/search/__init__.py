"""Hyper-parameter search, repeated seeds and cross-validation."""
