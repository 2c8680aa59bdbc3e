"""Training: the loop, what it trains, engines, checkpoints and the dropout generator."""
