"""What a recipe costs on given machines, before anything is spent: tokens, FLOPs, bytes, memory, time and what binds."""
