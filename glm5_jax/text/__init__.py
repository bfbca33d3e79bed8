"""Converts text and chats to token ids and back."""
