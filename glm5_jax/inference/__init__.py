"""Serving: an engine over a paged cache, from the same forward that trains."""
