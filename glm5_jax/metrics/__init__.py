"""Writes metrics and append-only logs, and draws charts."""
