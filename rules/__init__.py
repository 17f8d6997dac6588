"""Placement rules: which backend serves which module of the model."""
