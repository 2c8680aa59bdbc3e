"""Training: the loop, what it trains, engines, checkpoints, collectives and the dropout generator."""
