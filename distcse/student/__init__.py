"""The student: its loop, engines, checkpoints, and the run from a recipe to a saved model."""
