"""Reading, replaying and retracing jaxprs: all that JAX does not promise to keep.

:mod:`~jaxmp._jaxprs.jaxpr` alone leans on JAX's private names. The other modules say
where an equation stands (places, scopes, modules), what goes on around a call, and what
a trace would lose or leak (objects, state).
"""
