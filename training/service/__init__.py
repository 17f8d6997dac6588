"""Tuning runs beside serving: adapters are trained over the weights that an engine serves."""
