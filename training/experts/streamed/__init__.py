"""Experts whose weights go to a GPU layer by layer, for forward and backward of large micro-batches."""
