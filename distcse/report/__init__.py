"""What people see of a run: the terminal, and the model's card."""
