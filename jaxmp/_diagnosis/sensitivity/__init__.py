"""Which modules of a model need float32, measured.

:mod:`~jaxmp._diagnosis.sensitivity.sensitivity` has the public function.
"""
