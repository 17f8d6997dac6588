"""`ktserve bench`: a running OpenAI-compatible server at swept rates and concurrencies."""
