"""Distillation of a student from teachers' similarity lists: training task, backends, and the run from recipe to saved model."""
