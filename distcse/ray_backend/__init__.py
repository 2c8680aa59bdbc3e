"""Ray backend: the cluster, its nodes and their devices, the event channel, and metrics."""
