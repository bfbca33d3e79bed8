"""Measures of a trained model, and the baselines it has to beat."""
