"""The first Inf, NaN or fatal zero of a program, and what to type.

:mod:`~jaxmp._diagnosis.overflow.overflow` has the public function.
"""
