"""Optimizers of narrow parameters and states: 16-bit parameters, 8-bit moments.

Start with :mod:`~jaxmp._optimizers.narrow_params`, which does without float32 masters.
What is stored of a state is in :mod:`~jaxmp._optimizers.state_dtype`.
"""
