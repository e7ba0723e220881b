"""What the audit and the sensitivity say of programs of other libraries."""

import importlib
import inspect

import jax
import pytest
from laws import Program

import jaxmp
from jaxmp._hazards import Hazards
from jaxmp._places import Place

# The programs that have hazards, and which.
WRONG = {}
LIBRARIES = (
    "diffrax",
    "equinox",
    "graphs",
    "haiku",
    "jax",
    "linen",
    "probabilistic",
)


def programs_of(library):
    """Returns the functions that build programs of a library, by name."""
    try:
        module = importlib.import_module(f"test_{library}_programs")
    except pytest.skip.Exception:  # a library that is not installed
        return {}
    return {
        name: fun
        for name, fun in vars(module).items()
        if inspect.isfunction(fun)
        and fun.__module__ == module.__name__
        and not inspect.signature(fun).parameters
        and not name.startswith("test_")
    }


@pytest.mark.evidence
@pytest.mark.parametrize("library", LIBRARIES)
def test_clean_programs_of_a_library_have_no_hazards(library):
    for name, build in programs_of(library).items():
        program = build()
        if isinstance(program, Program):
            grad = jax.value_and_grad(program.loss, has_aux=program.has_aux)
            jaxpr = jax.make_jaxpr(jaxmp.autocast(grad))(*program.args)
            kinds = {hazard.kind for hazard in Hazards().found(jaxpr, Place())}
            assert kinds == WRONG.get(name, set()), name
