"""Training's parts: the experts' forward and backward pass."""
