"""What all of jaxmp stands on: policies, dtypes, trees and checks of arguments.

Nothing here reads jaxprs or knows of loss scales and devices, so that importing it is
cheap. What must be asked of those is in :mod:`~jaxmp._base.later`.
"""
