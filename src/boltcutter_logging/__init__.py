"""Pictures and tables of a run, and loggers of further services."""
