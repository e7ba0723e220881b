"""Attention as one operation, which cuDNN computes on an NVIDIA GPU in 16 bits.

The operation has rules of its own for gradients, tangents and ``vmap``. In float32, and
on other devices, it is that of ``jax.nn``.
"""
