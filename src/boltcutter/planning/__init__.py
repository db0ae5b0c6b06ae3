"""Commands before a training: check, doctor, memory estimate, choice of strategy, batch size."""
