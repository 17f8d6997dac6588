"""Readers of files: what they hold, before anything is computed from it. Torch-free."""
