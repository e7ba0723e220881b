"""The networks and programs that benchmarks and tests measure, at any size."""
