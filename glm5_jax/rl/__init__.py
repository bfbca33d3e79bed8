"""Reinforcement learning: turns rewards into per-token weights, on which one loss trains (GLM-5 3.2 to 3.4)."""
