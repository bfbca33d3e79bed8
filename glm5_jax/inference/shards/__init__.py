"""Transfers weights between processes: each offers the shards that it holds, and pulls those that its devices need."""
