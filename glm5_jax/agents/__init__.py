"""Uses models over a chat API: as judges of a policy's replies, and as agents that call tools."""
