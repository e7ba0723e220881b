"""Flax Linen: models under a policy or in shards, gradients of their activations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jmp
from jax.ad_checkpoint import checkpoint_name

from ._attention.for_flax import attend_as_flax
from ._attention.function import Implementation, as_arrays
from ._base.checks import check_function, short
from ._base.marks import Marked
from ._base.policy import PolicyLike, casting_policy
from ._base.tree import cast_tree, is_floating_array, path_name
from ._devices.gather import gather as _gather
from ._diagnosis.activations import activation_gradients as _activation_gradients
from ._diagnosis.text import PASS_THE_LOSS
from ._gradients.grad import cast_around as _cast_around
from ._names import missing, not_installed

try:
    import flax.linen as nn
    from flax.linen.dtypes import promote_dtype
except ModuleNotFoundError as _error:
    raise not_installed(__name__, "Flax", "flax") from _error

__all__ = [
    "activation_gradients",
    "dot_product_attention",
    "gather",
    "with_policy",
]

P = ParamSpec("P")
Module = TypeVar("Module", bound=nn.Module)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise missing(__name__, name)


def dot_product_attention(  # noqa: D417
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    *,
    is_causal: bool = False,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Attends as :func:`jaxmp.dot_product_attention`, for the layers of Linen.

    It is what ``attention_fn=`` of ``nn.MultiHeadDotProductAttention`` and
    ``nn.SelfAttention`` takes. What needs the weights goes the way of Flax's own
    attention, and :func:`jaxmp.audit` names it: dropout that is active, weights that
    are sown, products of one's own or with a ``precision``, and steps of decoding with
    a cache. The softmax is float32 in any case.

    The arguments that are not below are those of Flax's own attention.

    Args:
        query: ``[batch..., length, heads, size]``.
        key: ``[batch..., keys, heads, size]``.
        value: Of the shape of ``key``.
        bias: Added to the scores.
        mask: True where a query sees a key. An array of ``length`` times ``keys`` is
            read as often as the scores: prefer the arguments below.
        dtype: The dtype of query, key and value; None is their own.
        is_causal: Whether a query sees no key behind it. Say it with
            ``functools.partial``, in the place of a causal mask.
        key_value_seq_lengths: ``int32[batch]``, how many keys are not padding, in the
            place of a mask of padding.
        local_window_size: See :func:`jaxmp.dot_product_attention`.
        implementation: See :func:`jaxmp.dot_product_attention`.

    Returns:
        An array ``[batch..., length, heads, size]``.

    Examples:
        >>> import flax.linen as nn
        >>> attention = functools.partial(
        ...     jaxmp.linen.dot_product_attention, is_causal=True
        ... )
        >>> layer = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=attention)
        >>> x = jnp.ones((2, 4, 16))
        >>> layer.init_with_output(jax.random.key(0), x)[0].shape
        (2, 4, 16)
    """
    arrays = as_arrays("dot_product_attention", query=query, key=key, value=value)
    return attend_as_flax(
        nn.dot_product_attention,
        promote_dtype(*arrays.values(), dtype=dtype),
        bias,
        mask,
        {
            "is_causal": is_causal,
            "key_value_seq_lengths": key_value_seq_lengths,
            "local_window_size": local_window_size,
            "implementation": implementation,
        },
        broadcast_dropout=broadcast_dropout,
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        precision=precision,
        module=module,
        force_fp32_for_softmax=force_fp32_for_softmax,
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )


def with_policy(model: nn.Module, policy: PolicyLike) -> Callable[..., Any]:
    """Casts a Linen model by a policy that keeps some parameters in float32.

    This is :func:`jaxmp.with_policy` of ``model.apply``, which also casts the results
    of submodules back to compute dtype. In Linen a module without a ``dtype`` of its
    own promotes to its widest input or parameter, so that one float32 norm scale
    promotes every matmul after it to float32. Here only the norm itself is computed in
    float32. If the policy keeps the parameters of a module in float32, its matmuls run
    in full float32 precision, on a GPU or TPU too.

    A submodule's result is cast unless the module has a ``dtype`` of its own, or was
    called with a floating array in another dtype than the compute dtype. So a head
    built with ``dtype=jnp.float32`` returns float32, also through the modules around
    it, and what follows it stays float32.

    Args:
        model: A Linen module, not bound to variables.
        policy: A policy, its string, such as ``"O2"``, or a dtype.

    Returns:
        A function ``apply(variables, *args, **kwargs)`` with the signature of
        ``model.apply``, to be differentiated, jitted, or given to a Flax
        ``TrainState`` as its ``apply_fn``.

    Raises:
        TypeError: If ``model`` is not a Linen model, or bound to variables.
        ValueError: If the policy has a ``dot_dtype``.

    Examples:
        >>> import flax.linen as nn
        >>> model = nn.Sequential([nn.LayerNorm(), nn.Dense(2)])
        >>> variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
        >>> def product_dtype(apply):
        ...     jaxpr = jax.make_jaxpr(apply)(variables, jnp.ones((1, 3)))
        ...     (line,) = [x for x in str(jaxpr).splitlines() if "dot_general" in x]
        ...     return line.split(":")[1].split("[")[0]
        >>> product_dtype(jaxmp.with_policy(model.apply, "O2"))
        'f32'
        >>> product_dtype(with_policy(model, "O2"))
        'f16'
    """
    if not isinstance(model, nn.Module) or model.scope is not None:
        cure = "Pass the model itself: `jaxmp.linen.with_policy(model, policy)`."
        if isinstance(model, nn.Module):
            cure = "It is bound to variables: `model.unbind()` gives it back without."
        elif isinstance(model, (str, jmp.Policy)):
            cure = "The model comes first, and then the policy."
        raise TypeError(
            f"`jaxmp.linen.with_policy` needs a Linen model that is not bound, but got "
            f"{short(model)}. {cure} For other models and functions there is "
            "`jaxmp.with_policy`."
        )
    policy = casting_policy(policy, "jaxmp.linen.with_policy")
    compute_dtype = policy.compute_dtype

    @functools.wraps(model.apply, updated=())
    def apply(*args, **kwargs):
        chosen = Marked()  # results of modules with a dtype of their own
        default = jax.config.jax_default_matmul_precision  # pyright: ignore

        def bring_back(next_fun, args, kwargs, context):
            module = context.module
            held = {} if module.scope is None else module.scope.variables()
            own = held.get("params", {}).values()  # a mapping is a submodule's
            own = jax.tree.leaves([x for x in own if not isinstance(x, Mapping)])
            kept = any(getattr(x, "dtype", None) == jnp.float32 for x in own)
            kept = kept and compute_dtype != jnp.float32
            precision = "highest" if kept else default
            with jax.default_matmul_precision(precision):
                result = next_fun(*args, **kwargs)
            # `nn.share_scope` gives a submodule the path of the module around it.
            if not module.path and not isinstance(module.parent, nn.Module):
                return result
            if getattr(module, "dtype", None) is not None:
                chosen.add(jax.tree.leaves(result))
                return result
            arrays = filter(is_floating_array, jax.tree.leaves((args, kwargs)))
            if any(x.dtype != compute_dtype for x in arrays):
                return result
            return jax.tree.map(
                lambda x: x if x in chosen else cast_tree(x, compute_dtype), result
            )

        with nn.intercept_methods(bring_back):
            return model.apply(*args, **kwargs)

    return _cast_around("jaxmp.linen.with_policy", apply, policy, model.apply)


def gather(
    module: type[Module], specs: Any = None, policy: PolicyLike | None = None
) -> type[Module]:
    """Returns a class of modules that gather their parameters when they are called.

    This is :func:`jaxmp.gather` at the beginning of ``__call__``, for a class of
    layers, without a change in its code. The parameters of the model keep their names
    and shapes, and ``init`` does not gather. To apply the model to whole parameters,
    outside of the mesh, build it of ``module``.

    Put remat and scan around it:
    ``nn.scan(nn.remat(gather(Block, specs, policy)), ...)``.

    Args:
        module: The class of a layer.
        specs: As for :func:`jaxmp.gather`, of the collection ``params`` of the layer.
            None reads them off parameters that are boxed (``nn.with_partitioning``).
        policy: As for :func:`jaxmp.gather`.

    Returns:
        A subclass with the same name.

    Raises:
        TypeError: If ``module`` is not a class of Linen modules.
        ValueError: As :func:`jaxmp.gather`, when it is called.

    Examples:
        >>> import flax.linen as nn
        >>> from jax.sharding import Mesh, PartitionSpec as P
        >>> mesh, x = Mesh(jax.devices(), ("data",)), jnp.ones((8, 16))
        >>> specs = {"kernel": P("data"), "bias": P()}
        >>> Dense = gather(nn.Dense, specs, "mixed_bfloat16")
        >>> model = nn.Sequential([nn.Dense(16), nn.relu, Dense(2)])
        >>> params = jax.jit(model.init)(jax.random.key(0), x)
        >>> def loss_fn(params, x):
        ...     return jnp.mean(model.apply(params, x) ** 2)
        >>> shardings = {"params": {"layers_0": P(), "layers_2": specs}}
        >>> grad_fn = jaxmp.grad(
        ...     loss_fn, mesh=mesh, shardings=shardings, gather=False, batch_argnums=1
        ... )
        >>> grads = jax.jit(grad_fn)(params, x)
        >>> grads["params"]["layers_2"]["kernel"].shape
        (16, 2)
    """
    if not (isinstance(module, type) and issubclass(module, nn.Module)):
        cure = "Pass the class, such as `flax.linen.Dense`, and make modules of it."
        raise TypeError(
            "`jaxmp.linen.gather` needs a class of Linen modules, but got "
            f"{short(module)}. {cure}"
        )

    def is_box(x):
        return isinstance(x, nn.meta.AxisMetadata)

    def whole(variables):
        def gathered(params):
            own = nn.get_partition_spec(params) if specs is None else specs
            return jax.tree.map(
                # Flax's own way pins the array to its sharding, which it has no longer.
                lambda x: jax.tree.leaves(x)[0] if is_box(x) else x,
                _gather(params, own, policy),
                is_leaf=is_box,
            )

        return {name: gathered(params) for name, params in variables.items()}

    method = module.__call__
    mapped = nn.map_variables(method, "params", trans_in_fn=whole)

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        return (method if self.is_initializing() else mapped)(self, *args, **kwargs)

    # The name is that of the parameters of a module that is given none.
    members = {"__doc__": module.__doc__, "__call__": call}
    return type(module.__name__, (module,), members)  # pyright: ignore


def activation_gradients(
    fun: Callable[P, Any], **options: Any
) -> Callable[P, dict[str, jax.Array]]:
    """Differentiates a loss with respect to the results of its Linen modules.

    Like :func:`jaxmp.activation_gradients`, and each floating array that a method of
    a module returns has the module's path as its name: ``Block_0/Dense_1``, or for
    another method than ``__call__``, ``Embed_0.attend``. The model itself has the
    name of its class. A module that returns what its last submodule returned adds
    nothing.

    It does not see inside a loop: of a model with ``nn.scan`` over its layers, it
    returns only the modules around the scan.

    Args:
        fun: Function that applies Linen models and returns the loss, a real floating
            scalar, or with ``has_aux`` a pair of it and anything.
        **options: Those of :func:`jaxmp.activation_gradients`: ``loss_scale`` and
            ``has_aux``.

    Returns:
        A function with the arguments of ``fun`` that returns a dict from paths to
        gradients, in the dtype of the activation and scaled.

    Raises:
        ValueError: As :func:`jaxmp.activation_gradients`.
        TypeError: As :func:`jaxmp.activation_gradients`.

    Examples:
        >>> import flax.linen as nn
        >>> model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)])
        >>> params = model.init(jax.random.key(0), jnp.ones((4, 3)))
        >>> apply = jaxmp.with_policy(model.apply, "mixed_float16")
        >>> def loss_fn(params, x):
        ...     return jnp.mean(apply(params, x) ** 2)
        >>> grads = activation_gradients(loss_fn, loss_scale=2.0**15)
        >>> for path, grad in grads(params, jnp.ones((4, 3))).items():
        ...     print(path, grad.shape, grad.dtype)
        layers_0 (4, 8) float16
        layers_2 (4, 2) float16
    """

    check_function(
        "jaxmp.linen.activation_gradients",
        fun,
        "activation_gradients(loss_fn)",
        PASS_THE_LOSS,
    )

    @functools.wraps(fun, updated=())
    def named(*args, **kwargs):
        have_names = {}  # by id; the arrays are held, so that no id is used again

        def name_results(next_fun, args, kwargs, context):
            result = next_fun(*args, **kwargs)
            module, method = context.module, context.method_name
            prefix = "/".join(module.path) or type(module).__name__
            if method != "__call__":
                prefix += f".{method}"

            def name(path, x):
                if not is_floating_array(x) or id(x) in have_names:
                    return x
                x = checkpoint_name(x, "/".join([prefix, path_name(path)]).rstrip("/"))
                have_names[id(x)] = x
                return x

            return jax.tree.map_with_path(name, result)

        with nn.intercept_methods(name_results):
            return fun(*args, **kwargs)

    return _activation_gradients(named, **options)
