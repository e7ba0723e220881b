"""Loss scales: how they grow, skip a step, and are found in an optimizer state.

Start with :mod:`~jaxmp._training.loss_scale`, which scales and skips. How its state is
found again is in :mod:`~jaxmp._training.loss_scale_state`.
"""
