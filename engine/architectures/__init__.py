"""Model families: one record each, and what reading them shares. Torch-free."""
