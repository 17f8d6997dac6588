"""Several adapters in one batch, one pass over the base: each its own rank, learning rate, schedule and data."""
