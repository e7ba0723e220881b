"""Autocast: mixed precision for any function, within five sentences.

The function itself is in :mod:`~jaxmp._autocast.autocast`, the sentences are in
:mod:`~jaxmp._autocast.rules`, and ``docs/internals.md`` says how they go together.
"""
