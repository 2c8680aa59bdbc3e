"""Placement of a run on a cluster: nodes, requests for their resources, and the GPUs of processes. Independent of Ray."""
