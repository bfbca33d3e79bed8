"""Trains and applies a reward model: a scalar head on the backbone."""
