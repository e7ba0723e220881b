"""What a program does, as reports: audit, explain, overflow, sensitivity and ranges.

Each report has a package of its own. What several of them use lies beside these:
numbers that 16 bits round to 0 or Inf, and a replay in float32.
"""
