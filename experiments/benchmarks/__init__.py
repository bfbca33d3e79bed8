"""Benchmarks: programs that measure time, memory and traffic."""
