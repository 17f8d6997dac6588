"""What clients may send: one model of each body."""
