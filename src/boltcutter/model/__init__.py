"""Models: plain modules that take a batch and give logits or predictions."""
