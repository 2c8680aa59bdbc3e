"""Run directories: the recipe and records of a run, the lease that keeps one run to one process, and reruns."""
