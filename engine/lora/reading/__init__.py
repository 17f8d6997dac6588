"""Adapters are read in processes of their own, and handed over."""
