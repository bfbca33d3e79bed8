"""Reinforcement learning: rewards become per-token streams, and one learner trains on them."""
