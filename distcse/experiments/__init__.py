"""Kinds of runs: distillation from teachers, and mutual distillation (Trans-Encoder)."""
