"""Functions under a policy, and their gradients in true units.

Start with :mod:`~jaxmp._gradients.grad`, which has the public functions. How a loss is
differentiated is in :mod:`~jaxmp._gradients.differentiate`. A call that fails, or in
which no matmul runs in 16 bits, is told why by :mod:`~jaxmp._gradients.policy_notes`.
"""
