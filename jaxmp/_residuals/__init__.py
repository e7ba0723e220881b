"""What a forward pass keeps for its backward pass, stored in eight bits.

A pass over the program that autocast has written: :mod:`~jaxmp._residuals.plan` finds
what crosses from the one to the other, and :mod:`~jaxmp._residuals.replay` stores it.
"""
