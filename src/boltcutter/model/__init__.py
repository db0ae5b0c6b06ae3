"""Models: ``nn.Module`` classes that map a batch of inputs to logits or predictions."""
