"""Assembles an RL run of several programs: their configuration, roles, servers and trainer."""
