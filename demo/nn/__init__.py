"""The demo model in training: the forward, LoRA over it, and answers from it."""
