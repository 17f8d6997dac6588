"""What becomes of every field that clients send."""
