"""Computes advantages, per-token weights, rows and losses; no I/O."""
