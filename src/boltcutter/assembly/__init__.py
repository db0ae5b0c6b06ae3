"""A configuration becomes checked, live objects."""
