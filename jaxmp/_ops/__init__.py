"""What is known of a primitive: its list, its FLOPs, and how its products are rounded.

The names of primitives stand in :mod:`~jaxmp._ops.lists` and
:mod:`~jaxmp._ops.products`, and nowhere above them.
"""
