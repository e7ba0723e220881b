"""Training steps: loss scales, gradients in true units, and optimizer states.

Start with :mod:`~jaxmp._training.grad`, whose ``value_and_grad`` uses the scale of
:mod:`~jaxmp._training.loss_scale`. How a loss is differentiated is in
:mod:`~jaxmp._training.differentiate`; optimizers without float32 masters are in
:mod:`~jaxmp._training.narrow_params`.
"""
