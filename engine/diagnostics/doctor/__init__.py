"""`ktserve doctor`: what this machine is, what holds a server back on it, and what to do about that."""
