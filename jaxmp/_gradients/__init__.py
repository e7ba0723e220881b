"""Functions under a policy, and their gradients in true units.

Start with :mod:`~jaxmp._gradients.grad`, which has the public functions. How a loss is
differentiated is in :mod:`~jaxmp._gradients.differentiate`, and how a batch is taken
apart in :mod:`~jaxmp._gradients.micro_batches`.
"""
