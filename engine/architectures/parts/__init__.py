"""What layers are made of: attention, routers, MLPs, as data. Torch-free."""
