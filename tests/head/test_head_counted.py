"""In code compiled for a GPU a loss head has no array of logits."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp
from benchmarks.counting import hlo, targets
from benchmarks.networks.basic import Block

UNAVAILABLE = targets.unavailable()
pytestmark = pytest.mark.skipif(bool(UNAVAILABLE), reason=str(UNAVAILABLE))

ROWS, WIDTH, WORDS = 8192, 768, 50304
GRAD = functools.partial(jax.value_and_grad, argnums=(0, 1))


def written(hidden, embedding, labels):
    logits = hidden @ embedding.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def head(hidden, embedding, labels, **options):
    options |= {"transposed": True}
    return jaxmp.linear_cross_entropy(hidden, embedding, labels, **options)


def counted(fun, rows=ROWS, gpu="h200"):
    """Returns the temporary bytes of a program, those that it moves, and products."""
    shapes = (rows, WIDTH), (WORDS, WIDTH), (rows,)
    dtypes = jnp.float32, jnp.float32, jnp.int32
    args = map(jax.ShapeDtypeStruct, shapes, dtypes)
    compiled = targets.compiled(fun, *args, gpu=gpu)
    work = hlo.work(compiled.as_text())
    return compiled.memory_analysis().temp_size_in_bytes, work.bytes, work.products


@pytest.mark.parametrize(
    ("gpu", "dtype", "moves"),
    [
        ("h200", "bfloat16", 1.25),
        ("a100", "bfloat16", 1.25),
        ("t4", "float16", 1.35),
    ],
)
@pytest.mark.filterwarnings("ignore:.*float16:UserWarning")
def test_it_needs_a_third_of_the_memory(gpu, dtype, moves):
    policy = f"mixed_{dtype}"
    theirs, moved, _ = counted(jaxmp.autocast(GRAD(written), policy), gpu=gpu)
    for fun in (GRAD(jaxmp.autocast(head, policy)), jaxmp.autocast(GRAD(head), policy)):
        ours, bytes_moved, products = counted(fun, gpu=gpu)
        assert ours <= 0.35 * theirs
        assert bytes_moved <= moves * moved
        (kind,) = products  # three in each of four tiles, none twice
        assert kind.startswith("matmul bf16" if dtype == "bfloat16" else "matmul f16")
        assert products[kind] == 12


def test_odd_rows_cost_no_more():
    (ours, moved, _), (even, usual, _) = (
        counted(jaxmp.autocast(GRAD(head)), rows) for rows in (ROWS - 1, ROWS)
    )
    assert ours <= 1.01 * even
    assert moved <= 1.01 * usual


def test_without_gradients_a_tile_is_all_that_it_has():
    temporary, _, products = counted(jaxmp.autocast(head))
    assert temporary <= 2**29 + 2 * WORDS * WIDTH * 2
    assert [*products.values()] == [4]


def test_fewer_rows_take_less():
    few = functools.partial(head, tile_rows=512)
    temporary, *_ = counted(jaxmp.autocast(GRAD(few)))
    assert temporary <= 0.4 * counted(jaxmp.autocast(GRAD(head)))[0]


class GPT(nn.Module):
    """A GPT of 124M parameters, whose embedding is its head."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(WORDS, WIDTH)
        x = embed(tokens) + nn.Embed(tokens.shape[1], WIDTH)(
            jnp.arange(tokens.shape[1])
        )
        attend = functools.partial(jaxmp.dot_product_attention, is_causal=True)
        for _ in range(12):
            x = Block(heads=12, attention=attend)(x)
        return nn.LayerNorm()(x), embed.embedding


def step_counted(head):
    """Returns the temporary bytes of a training step, and those that it moves."""
    model, tx = GPT(), optax.adam(1e-3)
    tokens = jax.ShapeDtypeStruct((8, 1024), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    state = params, jax.eval_shape(tx.init, params)

    def loss(params, tokens, labels):
        return head(*model.apply(params, tokens), labels)

    def step(state, tokens, labels):
        grad = jaxmp.autocast(jax.value_and_grad(loss), "mixed_bfloat16")
        value, grads = grad(state[0], tokens, labels)
        updates, opt_state = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), value

    compiled = targets.compiled(step, state, tokens, tokens, donated=1)
    assert compiled.as_text().count('custom_call_target="__cudnn$fmha') == 24
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return temporary, hlo.work(compiled.as_text()).bytes


@pytest.mark.evidence
def test_the_step_of_a_gpt_needs_less_memory_and_moves_few_bytes_more():
    (ours, moved), (theirs, usual) = map(step_counted, (head, written))
    assert ours <= 0.72 * theirs
    assert moved <= 1.10 * usual
