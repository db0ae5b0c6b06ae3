"""The command line: commands, overrides, help, completion and one-line errors."""
