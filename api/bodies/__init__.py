"""Bodies: what becomes of each field, how they are parsed, and the chat and completion that all requests become."""
