"""Linen: the kinds of models that Flax's examples have, each in a few lines."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from laws import (
    DTYPES,
    KEY,
    Program,
    drawn,
    hold,
    multiplies_in_16_bits,
    near,
    normal,
    programs,
)

import jaxmp
from benchmarks.counting.measure import run
from conftest import rest_is_evidence

VOCABULARY = 13
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Block(nn.Module):
    """Attends to the past, or step by step to a cache of it."""

    decode: bool = False

    @nn.compact
    def __call__(self, x):
        mask = None if self.decode else nn.make_causal_mask(x[..., 0])
        attend = nn.MultiHeadDotProductAttention(2, decode=self.decode)
        x = x + attend(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))


class LanguageModel(nn.Module):
    """A transformer whose logits share the table of the embedding."""

    decode: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, 16, embedding_init=nn.initializers.normal(1.0))
        places = self.param("places", nn.initializers.normal(0.02), (8, 16))
        index = self.variable("cache", "index", lambda: jnp.zeros([], jnp.int32))
        start = index.value if self.decode else 0
        if self.decode and not self.is_initializing():
            index.value += tokens.shape[1]
        here = jax.lax.dynamic_slice_in_dim(places, start, tokens.shape[1])
        x = Block(self.decode)(embed(tokens) + here)
        return embed.attend(nn.LayerNorm()(x))


TOKENS = jnp.asarray((np.arange(4)[:, None] * 5 + np.arange(8) ** 2) % VOCABULARY)


def language_model_params():
    return {
        "params": drawn(jax.eval_shape(LanguageModel().init, KEY, TOKENS))["params"]
    }


def transformer():
    def loss(params, tokens):
        logits, _ = LanguageModel().apply(params, tokens, mutable="cache")
        return cross_entropy(logits[:, :-1], tokens[:, 1:]).mean()

    return Program(loss, (language_model_params(), TOKENS))


def decoded(params, prompt):
    """Returns the logits of 7 steps, each of which takes the likeliest token."""
    model = LanguageModel(decode=True)
    shapes = jax.eval_shape(model.init, KEY, TOKENS)["cache"]
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def step(carry, _):
        cache, token = carry
        variables = {**params, "cache": cache}
        logits, changed = model.apply(variables, token[:, None], mutable="cache")
        logits = logits[:, 0]
        return (changed["cache"], logits.argmax(-1)), logits

    return jax.lax.scan(step, (cache, prompt), length=7)


@pytest.mark.parametrize(
    "policy",
    rest_is_evidence({name: name for name in ("float32", *DTYPES)}, "mixed_float16"),
)
def test_cached_decoding_gives_what_the_whole_sequence_gives(policy):
    params, prompt = language_model_params(), TOKENS[:, 0]
    (cache, _), expected = run(decoded, params, prompt)[0]
    decode = jaxmp.autocast(decoded, policy)
    (cast_cache, _), got = run(decode, params, prompt)[0]
    chex.assert_trees_all_equal_dtypes(cast_cache, cache)
    if policy == "float32":
        np.testing.assert_array_equal(got, expected)
        return
    np.testing.assert_array_equal(got.argmax(-1), expected.argmax(-1))
    near([got], [expected], DTYPES[policy], 8)
    multiplies_in_16_bits(jaxmp.audit(decode)(params, prompt))
    # The sequence that was chosen, given whole.
    tokens = jnp.concatenate([prompt[None], got.argmax(-1)])[:-1].T
    whole = jaxmp.autocast(LanguageModel().apply, policy)
    logits = run(lambda *args: whole(*args, mutable="cache")[0], params, tokens)[0]
    near([got], [logits.swapaxes(0, 1)], DTYPES[policy], 8)


class Classifier(nn.Module):
    """Convolutions, a norm by statistics, dropout."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Conv(8, (3, 3), strides=2)(x))
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.avg_pool(x, (2, 2), (2, 2)).reshape(len(x), -1)
        x = nn.Dropout(0.25, deterministic=not train)(nn.relu(nn.Dense(16)(x)))
        return nn.Dense(5)(x)


def image_classifier():
    model = Classifier()
    images, labels = normal(1, 8, 8, 8, 2), jnp.arange(8) % 5
    params = drawn(jax.eval_shape(lambda: model.init(KEY, images, False)))
    stats = params.pop("batch_stats")

    def loss(params, stats, images, labels, key):
        logits, changed = model.apply(
            {**params, "batch_stats": stats},
            images,
            True,
            rngs={"dropout": key},
            mutable="batch_stats",
        )
        return cross_entropy(logits, labels).mean(), changed["batch_stats"]

    args = params, stats, images, labels, KEY
    return Program(loss, args, has_aux=True, tolerance=16)


class ActorCritic(nn.Module):
    """Two heads on one body: what to do, and what it is worth."""

    @nn.compact
    def __call__(self, frames):
        x = nn.relu(nn.Conv(8, (4, 4), strides=2)(frames / 255.0))
        x = nn.relu(nn.Dense(32)(x.reshape(len(x), -1)))
        return nn.log_softmax(nn.Dense(4)(x)), nn.Dense(1)(x)[:, 0]


def ppo():
    """The clipped surrogate, with a value loss and a bonus for entropy."""
    model = ActorCritic()
    frames = jnp.asarray(np.random.default_rng(1).integers(0, 256, (8, 8, 8, 2)))
    frames = frames.astype(jnp.uint8)
    params = drawn(jax.eval_shape(model.init, KEY, frames))
    actions = jnp.arange(8) % 4
    old = nn.log_softmax(normal(2, 8, 4))[jnp.arange(8), actions]
    returns, advantages = normal(3, 8), normal(4, 8)

    def loss(params, frames, actions, old, returns, advantages):
        log_probs, values = model.apply(params, frames)
        entropy = -(jnp.exp(log_probs) * log_probs).sum(1).mean()
        chosen = jax.vmap(lambda row, action: row[action])(log_probs, actions)
        ratio = jnp.exp(chosen - old)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        clipped = jnp.clip(ratio, 0.9, 1.1) * advantages
        policy_loss = -jnp.minimum(ratio * advantages, clipped).mean()
        value_loss = jnp.square(returns - values).mean()
        return policy_loss + 0.5 * value_loss - 0.01 * entropy

    return Program(loss, (params, frames, actions, old, returns, advantages))


class VAE(nn.Module):
    """Encodes into a normal distribution, draws from it, and decodes."""

    @nn.compact
    def __call__(self, x, key):
        h = nn.relu(nn.Dense(24, name="encoder")(x))
        mean, log_var = nn.Dense(4, name="mean")(h), nn.Dense(4, name="log_var")(h)
        z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(key, mean.shape)
        h = nn.relu(nn.Dense(24, name="decoder")(z))
        return nn.Dense(x.shape[-1], name="out")(h), mean, log_var


def vae():
    model, images = VAE(), jax.nn.sigmoid(normal(1, 8, 12))
    params = drawn(jax.eval_shape(model.init, KEY, images, KEY))

    def loss(params, images, key):
        logits, mean, log_var = model.apply(params, images, key)
        reconstruction = optax.sigmoid_binary_cross_entropy(logits, images).sum(-1)
        divergence = -0.5 * (1 + log_var - mean**2 - jnp.exp(log_var)).sum(-1)
        return (reconstruction + divergence).mean()

    return Program(loss, (params, images, KEY))


class Generator(nn.Module):
    @nn.compact
    def __call__(self, z):
        x = nn.Dense(4 * 4 * 8)(z).reshape(-1, 4, 4, 8)
        x = nn.BatchNorm(use_running_average=False)(x)
        return jnp.tanh(nn.ConvTranspose(1, (3, 3), strides=(2, 2))(nn.relu(x)))


class Discriminator(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3), strides=2)(x))
        x = nn.leaky_relu(x, 0.2)
        return nn.Dense(1)(x.reshape(len(x), -1))[:, 0]


def gan():
    """The generator's loss in a game, and the statistics of both networks."""
    generator, discriminator = Generator(), Discriminator()
    z, real = normal(1, 4, 6), normal(2, 4, 8, 8, 1)
    made = drawn(jax.eval_shape(generator.init, KEY, z))
    judge = drawn(jax.eval_shape(discriminator.init, KEY, real))
    params, stats = made.pop("params"), made["batch_stats"]

    def loss(params, stats, judge, z, real):
        variables = {"params": params, "batch_stats": stats}
        fake, changed = generator.apply(variables, z, mutable="batch_stats")
        images = jnp.concatenate([fake, real])
        logits, judged = discriminator.apply(judge, images, mutable="batch_stats")
        return nn.softplus(-logits[:4]).mean(), (changed, judged)

    args = params, stats, judge, z, real
    return Program(loss, args, has_aux=True, tolerance=16)


class Seq2Seq(nn.Module):
    """Reads a sum and writes the answer, fed what is right."""

    @nn.compact
    def __call__(self, question, answer, lengths):
        encode = nn.RNN(nn.LSTMCell(16), return_carry=True, name="encoder")
        carry, _ = encode(question, seq_lengths=lengths)
        decode = nn.RNN(nn.LSTMCell(16), name="decoder")
        return nn.Dense(VOCABULARY)(decode(answer, initial_carry=carry))


def seq2seq():
    model = Seq2Seq()
    question = jax.nn.one_hot(TOKENS[:, :5], VOCABULARY)
    answer = jax.nn.one_hot(TOKENS[:, 4:7], VOCABULARY)
    labels, lengths = TOKENS[:, 5:8], jnp.array([5, 3, 4, 5])
    params = drawn(jax.eval_shape(model.init, KEY, question, answer, lengths))

    def loss(params, question, answer, labels, lengths):
        logits = model.apply(params, question, answer, lengths)
        counts = labels != 0
        return (cross_entropy(logits, labels) * counts).sum() / counts.sum()

    return Program(loss, (params, question, answer, labels, lengths))


@programs(transformer, image_classifier, ppo, vae, gan, seq2seq)
def test_linen_programs_are_what_they_were(program, policy, order):
    hold(program, policy, order)
