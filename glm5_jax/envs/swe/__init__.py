"""Provides software engineering tasks: real issues with a repository, a patch and tests that it makes pass."""
