"""What each source line computes, in which dtype, and by which rule of autocast.

:mod:`~jaxmp._diagnosis.explain.explain` has the public function.
"""
