"""The student that learns from lists: its lesson, its place on a cluster, and the run from a recipe to a saved model."""
