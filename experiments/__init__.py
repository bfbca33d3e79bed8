"""Experiments: recipes of training, RL, evaluation and serving, each a file with `get_config(variant)`."""
