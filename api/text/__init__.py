"""Tokenizer files, chat templates, incremental text."""
