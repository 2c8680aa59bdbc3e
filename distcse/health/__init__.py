"""Checks of a machine, a cluster and a recipe before a run: each is one function and one line, with the fix."""
