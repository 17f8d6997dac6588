"""The embedded demo model: its world, its training, its files."""
