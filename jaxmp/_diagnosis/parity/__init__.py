"""Where two programs that should agree begin to differ.

:mod:`~jaxmp._diagnosis.parity.parity` has the public functions.
"""
