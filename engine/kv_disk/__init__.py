"""KV blocks on disk: their files, and the threads that write and read them."""
