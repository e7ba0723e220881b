"""What lies where on a mesh of devices, and how gradients are taken over it.

The public functions are in :mod:`~jaxmp._devices.mesh` and
:mod:`~jaxmp._devices.gather`; :mod:`~jaxmp._devices.over_devices` is what
``value_and_grad`` does with ``axis_name``, ``mesh`` and ``shardings``.
"""
