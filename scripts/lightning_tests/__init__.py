"""Lightning's own tests, run with what a training adds to Lightning."""
