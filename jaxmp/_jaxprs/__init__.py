"""Reading, replaying and retracing jaxprs: all that JAX does not promise to keep.

:mod:`~jaxmp._jaxprs.jaxpr` alone leans on JAX's private names. The other rooms say
where an equation stands (places, scopes, modules) and what a trace must not lose
(objects, kept_state, handed_back).
"""
