"""Environments: what attempts at a task are worth, and where they are made."""
