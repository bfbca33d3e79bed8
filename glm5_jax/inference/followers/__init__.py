"""Processes of an engine that spans several hosts: the first one sends commands, the others follow them."""
