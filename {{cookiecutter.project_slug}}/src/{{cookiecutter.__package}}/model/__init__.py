"""Models: any nn.Module."""
