"""The endpoints that generate, each in its form over one core."""
