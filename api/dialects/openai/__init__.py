"""OpenAI's chats and completions. Their bodies are in `api/bodies`: requests of the other dialects become them."""
