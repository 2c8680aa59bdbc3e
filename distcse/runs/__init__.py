"""Runs: distillation from teachers, families of students, mutual distillation; their directories, leases and reruns."""
