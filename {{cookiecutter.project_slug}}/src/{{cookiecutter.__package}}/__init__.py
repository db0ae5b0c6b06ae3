"""Code of this project."""
