"""From a request's bytes to token ids, in a process that can be cut off."""
