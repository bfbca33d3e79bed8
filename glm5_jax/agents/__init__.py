"""Models that are asked over the network: judges of what a policy wrote, and agents that call tools."""
