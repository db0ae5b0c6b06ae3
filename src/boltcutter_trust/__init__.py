"""What somebody else has made: which records and checkpoints may be opened, and what of them is loaded."""
