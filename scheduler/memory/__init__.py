"""What a running request holds: KV blocks, cached prefixes, adapter slots."""
