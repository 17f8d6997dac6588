"""Replicas: an engine behind a server each, and what they tell each other: adapters, loads, counts."""
