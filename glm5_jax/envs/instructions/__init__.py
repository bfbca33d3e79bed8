"""Tasks with constraints on the reply that a program can check, and guards against faults of replies."""
