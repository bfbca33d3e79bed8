"""Attention layers that the paper compares with MLA and sparse attention (GLM-5 2.1, tables 1, 4, 5)."""
