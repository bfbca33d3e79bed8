"""Samples rollouts: sessions of chats, the gateway of agents, and groups of attempts in this process."""
