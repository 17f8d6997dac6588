"""The engine process: weights, model, attention, experts, LoRA, sampling. Importing this package imports no torch."""
