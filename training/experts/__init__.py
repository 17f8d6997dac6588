"""The routed experts' forward and backward pass, and their LoRA."""
