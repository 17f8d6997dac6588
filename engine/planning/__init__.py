"""What an engine will be, decided before a byte of weights is read."""
