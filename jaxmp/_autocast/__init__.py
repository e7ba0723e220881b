"""Autocast: mixed precision for any function, by nine rules.

The function itself is in :mod:`~jaxmp._autocast.autocast`, the rules are sentences in
:mod:`~jaxmp._autocast.rules`, and ``docs/internals.md`` says how the rooms go together.
"""
