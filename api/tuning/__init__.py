"""Fine-tuning jobs: their records, their store, and what trains them over the engine."""
