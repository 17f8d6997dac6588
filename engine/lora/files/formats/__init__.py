"""One file per form in which an adapter's tensors lie on disk."""
