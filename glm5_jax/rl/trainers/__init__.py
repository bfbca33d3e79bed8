"""Trains on rollouts, synchronously or while others are sampled, and compares the engine with the trainer."""
