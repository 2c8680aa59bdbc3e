"""Run directories: a run's recipe and records, the lease that gives one process exclusive access, and reruns."""
