"""Autocast: mixed precision for any function, within five rules.

The function itself is in :mod:`~jaxmp._autocast.autocast`, the rules are in
:mod:`~jaxmp._autocast.rules`, and ``docs/internals.md`` says how they go together.
"""
