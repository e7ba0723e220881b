"""What XLA made of a program, read off the text of the compiled program.

:mod:`~jaxmp._compiled.text` has its parts, and :mod:`~jaxmp._compiled.products` its
matmuls and convolutions.
"""
