"""Where a training runs: this machine, or a cluster; imports no torch."""
