"""Pushes new weights from the trainer to engines."""
