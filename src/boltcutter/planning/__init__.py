"""What works on this machine, and what a training would need: commands that train little or not at all."""
