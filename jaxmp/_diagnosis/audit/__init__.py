"""Which matmuls run in which dtype, what made them float32, and the risks.

:mod:`~jaxmp._diagnosis.audit.audit` has the public functions.
"""
