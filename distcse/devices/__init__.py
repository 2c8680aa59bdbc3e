"""Where a run computes: this machine, its devices, a cluster's nodes, and each process's share. Independent of Ray."""
