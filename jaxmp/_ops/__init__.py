"""What is known of a primitive: its row, its FLOPs, and how its products are rounded.

The names of primitives stand in :mod:`~jaxmp._ops.table` and
:mod:`~jaxmp._ops.products`, and nowhere above them.
"""
