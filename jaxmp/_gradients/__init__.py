"""Functions under a policy, and their gradients in true units.

Start with :mod:`~jaxmp._gradients.grad`, which has the public functions. How a loss is
differentiated is in :mod:`~jaxmp._gradients.differentiate`. Why a call fails, or runs
nothing in 16 bits, is found by :mod:`~jaxmp._gradients.function_checks`.
"""
