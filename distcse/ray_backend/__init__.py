"""What stands on Ray: the cluster, its nodes and their devices, the event channel, metrics."""
