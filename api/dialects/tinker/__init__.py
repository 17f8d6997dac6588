"""Tinker's training API: orders to tuning runs by HTTP, answered by futures that clients wait for."""
