"""Flax NNX: gradients and autocast of functions that change the objects they get."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Never, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._attention.for_flax import attend_as_flax
from ._attention.function import Implementation, as_arrays
from ._autocast.autocast import autocast as _autocast
from ._base.checks import as_positions, as_tuple, explains, short
from ._base.objects import refuse_integers
from ._base.policy import Policy, PolicyLike, casting_policy, get_policy
from ._base.tree import AxisName, choose, is_floating_array, path_name
from ._devices.gather import gather as _gather
from ._gradients.differentiate import (
    Options,
    Reduction,
    check_loss_function,
    differentiate,
    loss_and_aux,
)
from ._jaxprs.modules import module_scopes
from ._jaxprs.state import handed_back
from ._names import missing, not_installed
from ._training.loss_scale_state import UNSCALED, skipped_in

try:
    from flax import nnx
    from flax.nnx.nn.dtypes import promote_dtype
except ModuleNotFoundError as _error:
    raise not_installed(__name__, "Flax", "flax") from _error

__all__ = ["autocast", "dot_product_attention", "gather", "value_and_grad"]

P = ParamSpec("P")
T = TypeVar("T")

_CALL = ("jaxmp.nnx.autocast(fun, restore=...)", "new", "old")
_TAG = "jaxmp"  # under which Flax remembers which objects are the caller's

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
    module: nnx.Module | None = None,
    promote_dtype: Callable[..., Any] = promote_dtype,
    is_causal: bool = False,
    *,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Attends as :func:`jaxmp.dot_product_attention`, for the layers of NNX.

    It is what ``attention_fn=`` of ``nnx.MultiHeadAttention`` takes. What needs the
    weights goes the way of Flax's own attention, and :func:`jaxmp.audit` names it:
    dropout that is active, weights that are sown, products with a ``precision``, and
    steps of decoding with a cache.

    The arguments that are not below are those of Flax's own attention.

    Args:
        query: ``[batch..., length, heads, size]``.
        key: ``[batch..., keys, key heads, size]``.
        value: Of the shape of ``key``.
        bias: Added to the scores.
        mask: True where a query sees a key. An array of ``length`` times ``keys`` is
            read as often as the scores: prefer the arguments below.
        dtype: The dtype of query, key and value; None is their own.
        is_causal: Whether a query sees no key behind it. Since Flax 0.12.8 the layer
            passes what it is called with: ``layer(x, is_causal=True)``.
        key_value_seq_lengths: ``int32[batch]``, how many keys are not padding, in the
            place of a mask of padding.
        local_window_size: See :func:`jaxmp.dot_product_attention`.
        implementation: See :func:`jaxmp.dot_product_attention`.

    Returns:
        An array ``[batch..., length, heads, size]``.

    Examples:
        >>> from flax import nnx
        >>> layer = nnx.MultiHeadAttention(
        ...     num_heads=2,
        ...     in_features=16,
        ...     decode=False,
        ...     attention_fn=jaxmp.nnx.dot_product_attention,
        ...     rngs=nnx.Rngs(0),
        ... )
        >>> layer(jnp.ones((2, 4, 16))).shape
        (2, 4, 16)
    """
    arrays = as_arrays("dot_product_attention", query=query, key=key, value=value)
    return attend_as_flax(
        nnx.dot_product_attention,
        promote_dtype(tuple(arrays.values()), dtype=dtype),
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
    )


@explains("jaxmp.nnx.value_and_grad(loss_fn, loss_scale=optimizer)(*args)")
def value_and_grad(  # noqa: D417
    fun: Callable[P, Any],
    *positional: Never,
    policy: PolicyLike | None = None,
    loss_scale: Any = UNSCALED,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    allow_int: bool = False,
    accum_steps: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
    mesh: jax.sharding.Mesh | None = None,
    shardings: Any = None,
    gather: bool = True,
) -> Callable[P, tuple[Any, Any]]:
    """Differentiates a function of NNX objects, as ``nnx.value_and_grad`` does.

    NNX objects may be anywhere in the arguments: modules, ``nnx.Rngs``, metrics,
    optimizers, alone, in containers, by keyword or twice. What ``fun`` changes in
    them reaches the caller's objects. The gradients are unscaled and at least float32,
    as those of :func:`jaxmp.value_and_grad`.

    With a policy, ``fun`` sees every ``nnx.Param`` of every argument in compute dtype,
    whether it is differentiated or not. All else is as it is: statistics, streams,
    optimizer states. A parameter that ``fun`` itself writes, such as a moving
    average, stays in its own dtype and keeps its digits; to find out, ``fun`` is
    then traced twice. Inside ``fun``, call the module under the policy too,
    ``jaxmp.with_policy(model, policy)(x)``, so that its inputs are in compute dtype
    and its outputs in float32; or cast them yourself. An ``nnx.BatchNorm`` without a
    ``dtype`` of its own may return float32, because of its statistics: build it with
    one, or use :func:`jaxmp.nnx.autocast`, which needs none of this.

    With ``accum_steps`` each micro-batch starts from the state of the one before.
    Dropout masks differ, running statistics see every micro-batch, and the state after
    the last one is returned. With ``mesh`` or ``axis_name`` each device has random
    streams of its own; floating state, such as running statistics, comes back as the
    mean over the devices, and what is not floating, such as counts, must be the same on
    all and comes back from the first. The options that are not below are those of
    :func:`jaxmp.value_and_grad`.

    Args:
        fun: Function that returns the loss, a real floating scalar, or with
            ``has_aux`` a pair of it and anything.
        *positional: Nothing. Pass all options by name.
        policy: None where the modules cast for themselves (built with ``dtype=...``);
            otherwise a policy, or its string. Its overrides are searched in the path
            of a variable in its argument, such as ``norm/scale``.
        loss_scale: As for :func:`jaxmp.value_and_grad`, such as the ``nnx.Optimizer``.
        argnums: The positional argument or arguments to differentiate, by number or
            as ``nnx.DiffState``, which has its own filter. Their arrays that
            are in no NNX object are differentiated as by ``jax.value_and_grad``.
        wrt: NNX filter of the variables to differentiate, where ``argnums`` has none.
        has_aux: Whether ``fun`` returns a pair.
        accum_steps: The number of micro-batches.
        batch_argnums: The positional arguments to split. NNX objects are not split.
        shardings: As for :func:`jaxmp.value_and_grad`, in the structure of the
            gradients or a prefix of it.

    Returns:
        A function with the signature of ``fun`` that returns ``(loss, gradients)`` or
        ``((loss, aux), gradients)``. The gradients have the structure that
        ``nnx.value_and_grad`` gives them: an ``nnx.State`` for a module, as
        ``nnx.Optimizer.update`` takes it.

    Raises:
        TypeError: If ``fun`` returns something else than a real floating scalar, or
            an argument is not there.
        ValueError: As :func:`jaxmp.value_and_grad`; if a variable is differentiated
            in one argument and not in another; or if, with micro-batches or a mesh,
            ``fun`` makes new variables or changes the shape of one.

    Examples:
        >>> from flax import nnx
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> def loss_fn(model, x):
        ...     return jaxmp.with_policy(model, "mixed_float16")(x).mean()
        >>> grad_fn = value_and_grad(
        ...     loss_fn, policy="mixed_float16", loss_scale=2.0**15
        ... )
        >>> loss, grads = grad_fn(model, jnp.ones((4, 2)))
        >>> jax.tree.map(lambda g: str(g.dtype), nnx.to_pure_dict(grads))
        {'bias': 'float32', 'kernel': 'float32'}
    """
    check_loss_function("nnx.value_and_grad", fun, positional)
    if policy is not None:
        policy = casting_policy(policy, "jaxmp.nnx.value_and_grad")
    positions, filters = _differentiated(argnums, wrt)
    options = Options(
        policy,
        loss_scale=loss_scale,
        argnums=positions,
        allow_int=allow_int,
        accum_steps=accum_steps,
        batch_argnums=batch_argnums,
        reduction=reduction,
        axis_name=axis_name,
        mesh=mesh,
        shardings=shardings,
        gather=gather,
    )
    batched = as_tuple(options.batch_argnums)
    fixed = options.accum_steps > 1 or mesh is not None

    @functools.wraps(fun, updated=())
    def wrapped(*args, **kwargs):
        if not all(-len(args) <= i < len(args) for i in (*filters, *batched)):
            # An argument that is asked for is given by keyword; or there is none, or
            # no signature, and that is said below. Elsewhere a keyword says that
            # nothing is to be split.
            with contextlib.suppress(TypeError, ValueError):
                bound = inspect.signature(fun).bind(*args, **kwargs)
                args, kwargs = bound.args, bound.kwargs
        _check_batch(args, batched)
        if not options.allow_int:
            wanted = {i % len(args) for i in filters if args}
            given = [x for i, x in enumerate(args) if i in wanted]
            refuse_integers("nnx.value_and_grad", None, given)
        with nnx.update_context(_TAG):
            arguments = _Arguments(args, kwargs, filters, options)
            written = frozenset()
            while True:
                call = _PureCall(fun, has_aux, arguments, policy, written, fixed)
                given = arguments.without_state(call.leaves)
                loss, aux, grads, changes = differentiate(
                    options,
                    call,
                    call.state,
                    *given,
                    user=fun,
                    warns=not written,
                )
                if not call.written:
                    break
                written |= call.written
            leaves = [changes.get(key, x) for key, x in call.after]
            outputs = call.structure.unflatten(leaves), aux
            _, aux = nnx.from_tree(outputs, ctxtag=_TAG, is_inner=False)
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


def gather(
    module: Callable[P, T], specs: Any, policy: PolicyLike | None = None
) -> Callable[P, T]:
    """Calls an NNX module with its parameters gathered.

    During the call, its variables of type ``nnx.Param`` are gathered by
    :func:`jaxmp.gather`. All other variables stay its own, with the changes that the
    call makes. Put remat and scan around it: ``nnx.remat(lambda block, x: gather(block,
    specs, policy)(x))``.

    Args:
        module: The module of a layer, or one of its methods.
        specs: As for :func:`jaxmp.gather`: a pytree with the structure of
            ``nnx.state(module, nnx.Param)`` or a prefix of it, which may be a dict.
        policy: As for :func:`jaxmp.gather`.

    Returns:
        A function with the signature of ``module``.

    Raises:
        TypeError: If ``module`` is not an NNX module.
        ValueError: As :func:`jaxmp.gather`, when it is called.

    Examples:
        >>> from flax import nnx
        >>> from jax.sharding import Mesh, PartitionSpec as P
        >>> mesh, model = Mesh(jax.devices(), ("data",)), nnx.Linear(
        ...     16, 2, use_bias=False, rngs=nnx.Rngs(0)
        ... )
        >>> def loss_fn(model, x):
        ...     return jnp.mean(gather(model, P("data"))(x) ** 2)
        >>> grad_fn = value_and_grad(
        ...     loss_fn, mesh=mesh, shardings=P("data"), gather=False, batch_argnums=1
        ... )
        >>> loss, grads = nnx.jit(grad_fn)(model, jnp.ones((8, 16)))
        >>> grads["kernel"].shape
        (16, 2)
    """
    owner = getattr(module, "__self__", module)
    if not isinstance(owner, nnx.Module):
        raise TypeError(
            f"`jaxmp.nnx.gather` needs an NNX module, but got {short(module)}. Pass "
            "the layer itself: `jaxmp.nnx.gather(layer, specs, policy)(x)`."
        )

    specs = nnx.State(specs) if isinstance(specs, dict) else specs

    @functools.wraps(module, updated=())
    def call(*args, **kwargs):
        shards = nnx.state(owner, nnx.Param)
        nnx.update(owner, _gather(shards, specs, policy))
        try:
            return module(*args, **kwargs)
        finally:
            nnx.update(owner, shards)

    return call


@explains('jaxmp.nnx.autocast(fun, "mixed_float16")(*args)')
def autocast(
    fun: Callable[P, T],
    policy: PolicyLike | None = None,
    *,
    restore: Any = nnx.BatchStat,
    **options: Any,
) -> Callable[P, T]:
    """Runs a function of NNX objects in mixed precision, and keeps what it changes.

    This is :func:`jaxmp.autocast` for functions that ``nnx.jit`` takes. NNX objects may
    be anywhere in the arguments and results of ``fun``. What ``fun`` changes in them
    (parameters, running statistics, random streams, metrics, optimizers, new
    attributes) changes in the caller's objects. ``fun`` may be a whole training step.
    Put it under ``nnx.jit``, and around ``nnx.value_and_grad`` rather than inside. In
    ``float32_paths`` name modules by the attributes down to them, such as
    ``"blocks/0"``.

    If ``fun`` is a training step and an ``nnx.Optimizer`` among its arguments skips it,
    because a gradient was Inf or NaN, running statistics become what they were before.

    Args:
        fun: Function of NNX objects and of anything else.
        policy: As for :func:`jaxmp.autocast`.
        restore: NNX filter of the variables that a skipped step leaves alone, such as
            ``(nnx.BatchStat, Average)``; None restores nothing. The state of an
            ``nnx.Optimizer`` is its own.
        **options: The keyword arguments of :func:`jaxmp.autocast`.

    Returns:
        A function with the signature of ``fun``.

    Raises:
        ValueError: As :func:`jaxmp.autocast`.

    Examples:
        >>> from flax import nnx
        >>> norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        >>> out = autocast(lambda norm, x: norm(x), "bfloat16")(norm, jnp.ones((4, 2)))
        >>> norm.mean.dtype, bool((norm.mean[...] > 0).all())
        (dtype('float32'), True)
    """
    _autocast(fun, policy, **options)  # refuses bad options now, not in the first call
    try:
        is_restored = nnx.filterlib.to_predicate(restore)
    except (TypeError, ValueError):
        raise TypeError(
            f"`restore` must be an NNX filter, but is {short(restore)}. Pass types of "
            "variables, such as `restore=(nnx.BatchStat, Average)`, or None."
        ) from None
    if policy is not None:  # of which a `reduce_dtype` has been warned about now
        policy = dataclasses.replace(get_policy(policy), reduce_dtype=None)
    call: Callable[..., Any] = fun  # of objects that stand for the caller's

    @functools.wraps(fun, updated=())
    def wrapped(*args, **kwargs):
        found = [
            entry for node in _nodes((args, kwargs)) for entry in nnx.iter_graph(node)
        ]
        optimizers = [x for _, x in found if isinstance(x, nnx.Optimizer)]
        skipped = skipped_in(optimizers)
        copies = [
            ("/".join(map(str, path)), x, jax.tree.map(lambda array: array, x))
            for path, x in found
            if isinstance(x, nnx.Variable) and is_restored(path, x)
            if not isinstance(x, nnx.OptState)  # with the loss scale, which must shrink
        ]
        with nnx.update_context(_TAG):
            inputs = nnx.to_tree((args, kwargs), ctxtag=_TAG)
            leaves, structure = jax.tree.flatten(inputs)

            @functools.wraps(fun, updated=())
            def pure(leaves):
                inputs = structure.unflatten(leaves)
                args, kwargs = nnx.from_tree(inputs, ctxtag=_TAG, is_inner=True)
                with module_scopes((args, kwargs)):
                    result = call(*args, **kwargs)
                return nnx.to_tree((_objects((args, kwargs)), result), ctxtag=_TAG)

            result = _autocast(pure, policy, **options)(leaves)
            _, result = nnx.from_tree(result, ctxtag=_TAG, is_inner=False)
        if skipped is None:
            return result
        finite = skipped_in(optimizers) == skipped
        for name, x, old in copies:
            pairs = zip(jax.tree.leaves(x), jax.tree.leaves(old), strict=False)
            if any(new is not before for new, before in pairs):
                x.update_from_state(choose(finite, {name: x}, {name: old}, _CALL)[name])
        return result

    return wrapped


class _Arguments:
    """The arguments of one call as numbered leaves, and what each of them is."""

    def __init__(
        self, args: Any, kwargs: Any, filters: dict[int, Any], options: Options
    ):
        self.filters = {i % len(args): f for i, f in filters.items() if args}
        _check_shared(args, kwargs, self.filters)
        tree = nnx.to_tree((args, kwargs), ctxtag=_TAG)
        entries, self.structure = jax.tree.flatten_with_path(tree)
        self.leaves = [leaf for _, leaf in entries]
        self.numbers = {path: number for number, (path, _) in enumerate(entries)}
        numbers = list(range(len(entries)))
        args, kwargs = self.without_state(numbers)
        self.given: list[int] = jax.tree.leaves((args, kwargs))
        differentiated = [arg for i, arg in enumerate(args) if i in self.filters]
        self.to_cast: set[int] = set(jax.tree.leaves(differentiated))
        self.paths: dict[int, Any] = {}
        states = jax.tree.map(
            lambda x: x.state if _is_node(x) else x,
            self.structure.unflatten(numbers),
            is_leaf=_is_node,
        )
        for path, x in jax.tree.leaves_with_path(
            states, is_leaf=lambda x: isinstance(x, nnx.Variable)
        ):
            self.paths.update(dict.fromkeys(jax.tree.leaves(x), path))
            if isinstance(x, nnx.Param):
                self.to_cast.update(jax.tree.leaves(x))
            elif isinstance(x, nnx.BatchStat):  # float32, also where differentiated
                self.to_cast.difference_update(jax.tree.leaves(x))
        devices = options.devices
        if devices is not None and not devices.gather:
            # What is in shards is cast by the gather that the user has written.
            given, _ = self.without_state(self.leaves)
            sharded = devices.sharded(options.params(given))
            params = jax.tree.leaves(options.params(args))
            pairs = zip(params, sharded, strict=True)
            self.to_cast.difference_update(number for number, own in pairs if own)

    def without_state(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
        """Returns the arguments with no more of NNX objects than is differentiated."""
        args, kwargs = self.structure.unflatten(leaves)
        args = [_part(arg, self.filters.get(i)) for i, arg in enumerate(args)]
        return tuple(args), _part(kwargs, None)

    def name(self, number: int) -> str:
        return path_name(self.paths[number][1:])


class _PureCall:
    """One call of ``fun`` as the pure function that ``differentiate`` takes.

    The state is what the NNX objects hold and what is not differentiated. Parameters
    are cast, except those that ``fun`` is known to write: these belong to the state,
    as they are. What it writes is only known once it has been traced, and then the
    call is made again.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        has_aux: bool,
        arguments: _Arguments,
        policy: Policy | None,
        known: frozenset[int],
        fixed: bool,
    ):
        self.fun, self.has_aux, self.arguments = fun, has_aux, arguments
        self.fixed = fixed  # whether the state must keep its structure and shapes
        self.leaves = list(arguments.leaves)
        if policy is not None:
            for number in arguments.to_cast - known:
                name = path_name(arguments.paths[number][2:])
                cast = policy.cast_to_compute({name: self.leaves[number]})
                self.leaves[number] = cast[name]
        held = {n for n, x in enumerate(self.leaves) if isinstance(x, jax.Array)}
        held = held.difference(arguments.given) | known
        self.keys = {n: f"{arguments.name(n)} #{n}" for n in held}
        self.state = {key: jnp.asarray(self.leaves[n]) for n, key in self.keys.items()}
        if policy is not None:
            # A weak type would become 16-bit where it meets a parameter that was cast.
            self.state = {
                key: x.astype(x.dtype) if is_floating_array(x) else x
                for key, x in self.state.items()
            }
        # What a trace of `fun` finds out:
        self.written: set[int] = set()  # what it writes and `known` does not have
        self.structure: Any = None  # of the NNX objects afterwards
        # Of their leaves: under which key of the changes it is, or what it is.
        self.after: list[tuple[str, Any]] = []

    def __call__(self, state, *args, **kwargs):
        leaves = [state.get(self.keys.get(n), x) for n, x in enumerate(self.leaves)]
        given = jax.tree.leaves((args, kwargs))
        for number, x in zip(self.arguments.given, given, strict=True):
            leaves[number] = x
        loss, aux, objects = self.run(leaves)
        return loss, aux, self.changes(objects, leaves)

    def run(self, leaves: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Returns the loss, aux, and the objects as ``fun`` leaves them."""
        inputs = self.arguments.structure.unflatten(leaves)
        args, kwargs = nnx.from_tree(inputs, ctxtag=_TAG, is_inner=True)
        with module_scopes((args, kwargs)):
            result = self.fun(*args, **kwargs)
        loss, aux = loss_and_aux(result, self.has_aux)
        outputs = _objects((args, kwargs)), aux
        objects, aux = nnx.to_tree(outputs, ctxtag=_TAG)
        return loss, aux, objects

    def handed_back(self, objects: Any, leaves: Sequence[Any]) -> set[int]:
        """Returns which parameters are new tracers of the value that they had.

        An ``nnx.remat`` writes all variables of its module.
        """

        numbers = self.arguments.numbers

        def by_number(objects):
            entries = jax.tree.leaves_with_path(objects)
            return {numbers[path]: x for path, x in entries if path in numbers}

        def again(replaced):
            *_, objects = self.run([replaced.get(n, x) for n, x in enumerate(leaves)])
            return by_number(objects)

        state = {n for n in self.keys if self.leaves[n] is self.arguments.leaves[n]}
        new = {
            n: leaves[n]
            for n, x in by_number(objects).items()
            if isinstance(x, jax.Array) and x is not leaves[n] and n not in state
        }
        return handed_back(again, new)

    def changes(self, objects: Any, leaves: Sequence[Any]) -> dict[str, jax.Array]:
        """Returns what ``fun`` has changed; nothing if it must be traced again."""
        entries, self.structure = jax.tree.flatten_with_path(objects)
        number_of = {id(x): number for number, x in enumerate(leaves)}
        handed_back = self.handed_back(objects, leaves)
        self.after, changes = [], {}
        for path, x in entries:
            number = self.arguments.numbers.get(path)
            if number is not None and (x is leaves[number] or number in handed_back):
                self.after.append(("", self.arguments.leaves[number]))
                continue
            if number is None and self.fixed:
                raise ValueError(
                    f"The function creates the variable `{path_name(path[1:])}`, which "
                    "does not work with `accum_steps` or `mesh`. Create it before, or "
                    "remove it with `nnx.pop` inside the function and return it as "
                    "`aux`, with `has_aux=True`."
                )
            # A parameter that is copied to another variable keeps its digits, too.
            for n in (number, number_of.get(id(x))):
                if n is not None and self.leaves[n] is not self.arguments.leaves[n]:
                    self.written.add(n)
            if not isinstance(x, jax.Array) and not self.fixed:
                self.after.append(("", x))
                continue
            if number is None:
                key = f"new #{len(self.after)}"
            elif number in self.keys:
                key = self.keys[number]
                x = self.as_before(number, x)
            else:
                self.written.add(number)
                continue
            changes[key] = x
            self.after.append((key, None))
        return {} if self.written else changes

    def as_before(self, number: int, x: Any) -> jax.Array:
        """Returns the new value of a variable in its own dtype."""
        x, old = jnp.asarray(x), jnp.asarray(self.arguments.leaves[number])
        if is_floating_array(x) and is_floating_array(old):
            x = x.astype(old.dtype)
        if self.fixed and (x.shape, x.dtype) != (old.shape, old.dtype):
            raise ValueError(
                f"The function changes `{self.arguments.name(number)}` from "
                f"{old.dtype}{list(old.shape)} to {x.dtype}{list(x.shape)}. With "
                "`accum_steps` or `mesh` a variable must keep its shape and dtype."
            )
        return x


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.extract.NodeStates)


def _is_object(x: Any) -> bool:
    return isinstance(x, nnx.Variable) or nnx.graph.is_graph_node(x)


def _nodes(tree: Any) -> list[Any]:
    """Returns the NNX objects of a pytree."""
    return list(filter(_is_object, jax.tree.leaves(tree, is_leaf=_is_object)))


def _objects(tree: Any) -> Any:
    """Returns a pytree with None in the place of what is not an NNX object."""
    return jax.tree.map(
        lambda x: x if _is_object(x) else None, tree, is_leaf=_is_object
    )


def _part(tree: Any, wrt: Any) -> Any:
    """Returns a pytree with, of its NNX objects, the variables of a filter alone."""

    def part(x):
        if not _is_node(x):
            return x
        if wrt is None or isinstance(x.state, nnx.Variable):
            return None if wrt is None else x.state
        return nnx.filter_state(x.state, wrt)

    return jax.tree.map(part, tree, is_leaf=_is_node)


def _differentiated(
    argnums: Any, wrt: Any
) -> tuple[int | tuple[int, ...], dict[int, Any]]:
    """Returns the positions to differentiate, and the filter of each."""
    several = isinstance(argnums, (Sequence, np.ndarray)) and np.ndim(argnums) > 0
    filters = {}
    for entry in argnums if several else (argnums,):
        if not isinstance(entry, nnx.DiffState):
            entry = nnx.DiffState(as_positions("argnums", entry), wrt)  # pyright: ignore
        if entry.argnum in filters:
            raise ValueError(
                f"`argnums` names the argument {entry.argnum} twice. Give it once, "
                "with `nnx.DiffState(argnum, filter)` for several kinds of variables."
            )
        filters[entry.argnum] = entry.filter
    return tuple(filters) if several else next(iter(filters)), filters


def _held(arg: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yields the objects of an argument with the variables in each and their paths."""
    for node in _nodes(arg):
        for path, x in nnx.iter_graph(node):
            if isinstance(x, nnx.Variable):
                yield node, path, x


def _check_shared(args: Any, kwargs: Any, filters: dict[int, Any]) -> None:
    """Raises where only some of the occurrences of a variable are differentiated."""
    seen: dict[int, bool] = {}
    for i, arg in enumerate((*args, kwargs)):
        wanted = nnx.filterlib.to_predicate(filters.get(i))
        for node, path, x in _held(arg):
            is_wanted = (x is node and i in filters) or wanted(path, x)
            if seen.setdefault(id(x), is_wanted) != is_wanted:
                raise ValueError(
                    f"The {type(x).__name__} `{'/'.join(map(str, path))}` is in two "
                    "arguments, and differentiated in one of them only. Pass the "
                    "object once, or name both arguments in `argnums`."
                )


def _check_batch(args: Any, batched: Sequence[int]) -> None:
    """Raises where the batch holds variables, which would not be split."""
    for i, arg in enumerate(args):
        if i not in batched and i - len(args) not in batched:
            continue
        for node, _, x in _held(arg):
            if not isinstance(x, nnx.RngState):
                raise ValueError(
                    f"`batch_argnums` names the argument {i}, which holds the NNX "
                    f"object `{type(node).__name__}`. Objects are not split: take the "
                    "argument out, or pass arrays."
                )
