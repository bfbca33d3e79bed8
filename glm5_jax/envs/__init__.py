"""Environments: sandboxes, tasks, tools and verifiers."""
