"""Attacks on a running server, and what became of them."""
