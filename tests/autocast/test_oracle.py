"""The five sentences are true of every value: what they do not allow is float32.

The oracle is written from the sentences alone, and knows nothing of the engine.
"""

import functools
import inspect

import jax
import pytest
from jax.ad_checkpoint import checkpoint_name
from observed import Comparison, compared, values_of

from benchmarks import golden

oracle = pytest.importorskip("oracle")
pytestmark = pytest.mark.skipif(
    jax.__version__ != golden.JAXLIB,
    reason=f"other versions of JAX write other programs than {golden.JAXLIB}",
)

EVERYDAY = (
    "llama", "gpt", "gpt, scanned", "mixture of experts", "vit", "convnext", "resnet",
    "u-net", "lstm", "bert", "mixer", "efficientnet", "gru",
)  # fmt: skip
FORMS = "forward", "with gradients"


@functools.cache
def of_generated(seed: int, form: str) -> Comparison:
    """Returns what the sentences and autocast make of a generated program."""
    fun, args = golden._generated(seed)
    fun = inspect.unwrap(fun) if form == "forward" else fun
    return compared(values_of(fun, args), oracle.allowed)


@functools.cache
def of_model(name: str, form: str) -> Comparison:
    """Returns what the sentences and autocast make of a step of a model."""
    fun, args = golden._network(name)
    fun = inspect.unwrap(fun) if form == "forward" else fun
    return compared(values_of(fun, args), oracle.allowed)


def fail_beyond(found: Comparison, program: str) -> None:
    """Fails if a value is in 16 bits that the sentences do not allow."""
    if found.beyond:
        lines = "\n".join(map(str, found.beyond))
        pytest.fail(
            f"Autocast has 16 bits in {program} where no sentence allows it:\n{lines}",
            pytrace=False,
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(golden.GENERATED))
def test_no_value_of_a_program_is_in_16_bits_that_no_sentence_allows(seed, form):
    fail_beyond(of_generated(seed, form), f"program {seed}, {form}")


@pytest.mark.evidence
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("first", range(golden.GENERATED, 1000, 100))
def test_so_it_is_in_a_thousand_programs(first, form):
    for seed in range(first, first + 100):
        fail_beyond(of_generated(seed, form), f"program {seed}, {form}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EVERYDAY)
def test_no_value_of_a_model_is_in_16_bits_that_no_sentence_allows(name, form):
    fail_beyond(of_model(name, form), f"{name}, {form}")


@pytest.mark.parametrize("saved", ["names", "matmuls"])
def test_what_a_policy_of_checkpointing_saves_is_no_exception(saved):
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names("h")
    if saved == "matmuls":
        policy = policies.dots_with_no_batch_dims_saveable

    def layer(x, w):
        return jax.nn.gelu(checkpoint_name(x @ w, "h"))

    def loss(w, x):
        layer_again = jax.checkpoint(layer, policy=policy)
        return (layer_again(layer_again(x, w), w) ** 2).mean()

    args = (jax.ShapeDtypeStruct((16, 16), "float32"),) * 2
    found = compared(values_of(jax.value_and_grad(loss), args), oracle.allowed)
    fail_beyond(found, f"a layer of which {saved} are saved")


def test_of_what_the_sentences_allow_nearly_all_is_in_16_bits():
    found = [of_model(name, form) for name in EVERYDAY for form in FORMS]
    allowed, float32 = (
        sum(len(getattr(x, field)) for x in found) for field in ("allowed", "float32")
    )
    assert float32 <= 0.03 * allowed


@pytest.mark.parametrize("form", FORMS)
def test_what_is_allowed_and_float32_is_so_for_a_safeguard(form):
    found = [of_generated(seed, form) for seed in range(golden.GENERATED)]
    allowed, unnamed = (
        sum(len(getattr(x, field)) for x in found) for field in ("allowed", "unnamed")
    )
    assert unnamed <= 0.03 * allowed
