"""Fine-tuning of LoRA over the very experts that are served: `ktserve train`."""
