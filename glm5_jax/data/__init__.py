"""Converts documents on disk to batches of packed token records."""
