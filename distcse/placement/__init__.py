"""Placement of a run on a cluster: nodes, requests for their resources, and how GPUs are shared out. Independent of Ray."""
