"""Placement of a run on a cluster: nodes, requests for their resources, and warnings of unused GPUs. Independent of Ray."""
