"""Dialects: what clients of each api send and read, a folder each. Requests become chats or completions."""
