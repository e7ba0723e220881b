"""What lies where on a mesh of devices, and how it is gathered and split.

The public functions are in :mod:`~jaxmp._devices.mesh` and
:mod:`~jaxmp._devices.gather`; :mod:`~jaxmp._devices.batch` splits a batch into
micro-batches.
"""
