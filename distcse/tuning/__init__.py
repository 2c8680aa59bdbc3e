"""Sweeps: a search over a recipe's knobs, its trials on Ray Tune."""
