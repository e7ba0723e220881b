"""Measurements of what jaxmp promises: ``python -m benchmarks NAME``."""
