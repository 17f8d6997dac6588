"""What the dialects share."""
