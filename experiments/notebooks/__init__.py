"""Notebooks that demonstrate the project, and the code that they share."""
