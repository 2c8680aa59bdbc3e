"""What a run costs, from a few formulas or from a short measured run: time, memory, disk and the bottleneck."""
