"""Tasks of math, science and code, and their verifiers."""
