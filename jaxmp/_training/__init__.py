"""What lies in an optimizer state: loss scales, 16-bit parameters, narrow moments.

Start with :mod:`~jaxmp._training.loss_scale`, which scales and skips. How its state is
found again is in :mod:`~jaxmp._training.loss_scale_state`. Optimizers without float32
masters are in :mod:`~jaxmp._training.narrow_params`.
"""
