"""How benchmarks count and time: compiled code, bytes, training steps, results."""
