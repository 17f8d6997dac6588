"""Structured output: grammars compiled, cached and followed, a mask per token."""
