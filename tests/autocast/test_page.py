"""The pages on autocast say what it does: its rules, and the dtype of each name."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from benchmarks import names
from jaxmp import autocast
from jaxmp._autocast import rules

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "rules.md").read_text()
EXAMPLES = re.findall(r"- `y = (.+?)`, then `(.+?)`: `y` is (\w+)\.", PAGE)


def test_the_page_has_the_terms_and_the_rules_word_for_word():
    page = " ".join(PAGE.split())
    assert all(term in page for term in rules.TERMS.values())
    for number, sentence in rules.RULES.items():
        assert f" {number}. {sentence} " in page


def test_each_rule_has_an_example():
    section = PAGE[
        PAGE.index("## The nine rules") : PAGE.index("Where two rules disagree")
    ]
    for rule in re.split(r"\n\d+\. ", section)[1:]:
        assert "- `y = " in rule


@pytest.mark.parametrize(("first", "then", "dtype"), EXAMPLES)
def test_an_example_of_a_rule_has_the_dtype_that_the_page_says(first, then, dtype):
    def fun(x, w, b):
        known = {"x": x, "w": w, "b": b, "jax": jax, "jnp": jnp, "lax": lax}
        y = checkpoint_name(eval(first, known), "y")
        return eval(then, {**known, "y": y})

    args = jnp.ones((4, 8)), jnp.ones((8, 8)), jnp.ones(8)
    jaxpr = jax.make_jaxpr(autocast(fun, "bfloat16"))(*args)
    found = [x for x in jaxpr.eqns if x.primitive.name == "name"]
    assert [x.outvars[0].aval.dtype for x in found] == [dtype]


def test_the_table_is_what_autocast_does_to_some_names():
    page = (DOCS / "names.md").read_text()
    for row in names.rows(every=16):
        assert row in page, "Type `python -m benchmarks names`."


@pytest.mark.evidence
def test_the_table_is_what_its_command_writes():
    assert (DOCS / "names.md").read_text() == names.page()
