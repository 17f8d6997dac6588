"""Replicas of the server on several machines, over Ray: docs/scale-out.md."""
