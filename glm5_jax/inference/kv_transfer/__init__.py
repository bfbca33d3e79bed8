"""Moves pages of the KV cache from engines that prefill prompts to engines that decode."""
