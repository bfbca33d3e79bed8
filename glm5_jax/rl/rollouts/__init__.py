"""Samples rollouts: sessions of chats, their gateway, and groups in this process."""
