"""How weights are moved: the loop that carries out lessons, engines, checkpoints, the run directory, the cluster."""
