"""Configurations as files spell them. Torch-free."""
