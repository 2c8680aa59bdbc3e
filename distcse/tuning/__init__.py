"""Sweeps: a search over a recipe's parameters, with trials on Ray Tune."""
