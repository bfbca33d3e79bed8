"""Runs environments of the `verifiers` library as task services, where it is installed."""
