"""Locust scenarios and their reports."""
