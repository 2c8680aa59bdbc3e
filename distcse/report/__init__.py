"""Output for people: progress, tables on the terminal, report pages and model cards."""
