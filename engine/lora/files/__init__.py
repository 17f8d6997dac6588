"""What an adapter's folder holds: settings, tensors and keys, read and written."""
