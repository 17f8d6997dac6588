"""Plots and pages of measured runs, without anything from elsewhere."""
