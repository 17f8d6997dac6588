"""Sums over the memory of the other GPUs of a machine."""
