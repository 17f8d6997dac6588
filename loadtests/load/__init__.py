"""Locust users that talk to an OpenAI-compatible server, and what they saw."""
