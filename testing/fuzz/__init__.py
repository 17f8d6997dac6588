"""Mutated files and bodies: whatever they hold, each ends in an answer or a refusal, within limits."""
