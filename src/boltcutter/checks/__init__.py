"""What fits a machine: doctor, memory estimate, choice of strategy, batch size."""
