"""What is checked before a training: components, their combination, hardware, the first batch."""
