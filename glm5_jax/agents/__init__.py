"""Models that are asked over the network: judges of what a policy wrote."""
