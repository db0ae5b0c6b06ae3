"""Benchmarks: ratios of times and memory, measured within one run."""
