"""Checks of a machine, a cluster and a recipe before a run: each is one function that returns lines with a result and a fix."""
