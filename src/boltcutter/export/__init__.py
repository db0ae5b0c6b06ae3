"""Export of trained models to files that run without this library, and their comparison with the original."""
