"""Connects trainer and task services: groups of rollouts, staleness, fair shares and retries."""
