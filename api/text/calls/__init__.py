"""Calls of tools: how models write them, and how what they write is read."""
