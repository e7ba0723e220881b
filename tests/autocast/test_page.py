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
TEXT = "sentences.md"
PAGE = (DOCS / "rules.md").read_text()
EXAMPLES = re.findall(r"- `y = (.+?)`, then `(.+?)`: `y` is (\w+)\.", PAGE)


def spelled(path):
    return " ".join(path.read_text().split())


def test_the_pages_have_the_sentences_and_the_safeguards_word_for_word():
    page, whole = spelled(DOCS / "rules.md"), spelled(Path(__file__).parent / TEXT)
    for number, sentence in rules.SENTENCES.items():
        assert f" {number}. {sentence} " in page
        assert f" {sentence} " in whole
    for name, sentence in rules.SAFEGUARDS.items():
        assert f" **{name}**: {sentence} *" in page
        assert f" **{name}**: {sentence[0].lower()}{sentence[1:]} *" in whole


def test_there_are_five_sentences_and_five_safeguards_and_each_is_one_sentence():
    assert list(rules.SENTENCES) == [1, 2, 3, 4, 5]
    assert len(rules.SAFEGUARDS) == 5
    for sentence in (rules.SENTENCES | rules.SAFEGUARDS).values():
        assert sentence.endswith(".")
        assert ". " not in sentence
        assert "unless" not in sentence
        assert len(sentence.split()) <= 36


def test_each_sentence_has_an_example():
    section = PAGE[PAGE.index("## Five rules") : PAGE.index("## Five guards")]
    for sentence in re.split(r"\n\d+\. ", section)[1:]:
        assert "- `y = " in sentence


@pytest.mark.parametrize(("first", "then", "dtype"), EXAMPLES)
def test_an_example_has_the_dtype_that_the_page_says(first, then, dtype):
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
