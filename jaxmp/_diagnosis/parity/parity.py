"""Where two programs that should agree begin to differ.

Both run once as they are, with the values that go into modules and come out of them as
outputs (:mod:`~.program`). These are paired by the names of the modules
(:mod:`~.pairs`). Then the second program runs again, and goes on with the value of the
reference at each of them: what is off now, the lines before it have added. Both run
again with all that is rounded moved by one unit in its last place, which says how much
of that is rounding.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._base.checks import (
    check_function,
    check_positive,
    describe,
    explains,
    short,
)
from ..text import uncalled
from .pairs import Key, Pairs, Slot, key_of, path_at, slots_of, slots_of_stored, spelled
from .program import (
    BACKWARD,
    DRAWS,
    FORCED,
    FREE,
    IN,
    NAMED,
    RESULT,
    Compared,
    Crossing,
    Seen,
)
from .report import ModuleParity, OutputParity, ParityReport

_PASS_IT = "Pass a function that calls `model.apply(params, x)`."
Arrays = Mapping[str, Any] | str | os.PathLike[str]


@explains("jaxmp.parity(f, g)(*args)")
def parity(
    reference: Callable[..., Any] | Arrays,
    other: Callable[..., Any] | Arrays,
    *,
    names: Mapping[str, str] | None = None,
    devices: Sequence[Any] | None = None,
    log_probs: bool = False,
    band: float = 0.01,
) -> Callable[..., ParityReport]:
    """Compares two functions, and finds the module with which they begin to differ.

    Pass two functions of the same arguments that should return the same: a model and
    its port, in float32 and in 16 bits, a sampler and a trainer. One of them may be
    arrays that somebody stored by name, such as the outputs of PyTorch's modules.

    Both run, compiled, and the outputs of modules that both have are compared: modules
    of Linen, NNX, Equinox and Haiku by path, and what ``jax.named_scope`` or
    ``checkpoint_name`` names. Then the second runs with the values of the reference
    in the place of its own wherever one goes into a module or comes out of it. What is
    off there, the module's own lines have added. It *differs* if that is more than
    comes of moving each operand and result of its operations, in both programs, by one
    unit in the last place of its dtype, and the terms of a sum by the root of their
    number. Rounding to nearest moves a result by half a unit at most.

    Results are those of ``jax.jit``, which may leave out roundings; modules have every
    rounding that is written. Of a gradient, the forward pass is compared by module, and
    the gradients as results. What only moves or casts arguments, such as the transpose
    of a weight, is compared with what is computed of it.

    Args:
        reference: Function that JAX can trace, or arrays: a dict, or the path of an
            ``npz`` file, with a key for each module. See
            :func:`jaxmp.named_values` for the keys.
        other: The function to compare with it. If these are arrays, they are the
            reference.
        names: Paths of the reference and the same paths in the other, where modules
            have other names: ``{"transformer/h_0": "layers_0"}``. What is inside of
            them is meant, too. The outermost name, the class of a model, may differ.
        devices: A device for each function, or the name of a platform:
            ``("cpu", "gpu")``. None leaves arguments where they are.
        log_probs: Whether the results are log-probabilities ``[..., length]``, of which
            ratios of probabilities and each place are reported.
        band: What a result is counted as outside of, see :class:`OutputParity`.

    Returns:
        A function of the arguments that returns a :class:`ParityReport`.

    Raises:
        TypeError: If neither is a function, or an argument has no values.
        ValueError: If nothing can be compared, ``names`` has a path that is not there,
            or an argument was donated to a step that has run.

    Examples:
        >>> import functools
        >>> def model(w, x, gelu):
        ...     with jax.named_scope("up"):
        ...         h = x @ w
        ...     with jax.named_scope("gelu"):
        ...         return gelu(h)
        >>> exact = functools.partial(jax.nn.gelu, approximate=False)
        >>> original = functools.partial(model, gelu=exact)
        >>> port = functools.partial(model, gelu=jax.nn.gelu)
        >>> w, x = jnp.linspace(-1, 1, 64).reshape(8, 8), jnp.linspace(0, 1, 8)
        >>> report = jaxmp.parity(original, port)(w, x)
        >>> report.first.path
        'gelu'
        >>> report.assert_within(result=1e-2)
    """
    _check(names, band)
    given = [_stored(x) for x in (reference, other)]
    pairs = zip((reference, other), given, strict=True)
    functions: list[Any] = [x for x, stored in pairs if stored is None]
    if not functions:
        raise TypeError(
            "`parity` needs a function to compare the arrays with. Type "
            "`jaxmp.parity(arrays, f)(*args)`."
        )
    for fun in functions:
        check_function("parity", fun, "parity(f, g)", _PASS_IT)
    stored = next((x for x in given if x is not None), None)
    places = _devices(devices, len(functions))

    @functools.wraps(functions[0], updated=())
    def compared(*args: Any, **kwargs: Any) -> ParityReport:
        both = zip(functions, places, strict=True)
        programs = [Compared(fun, args, kwargs, device) for fun, device in both]
        return Comparison(programs, stored, names).report(log_probs, band)

    return uncalled("parity", functions[0], compared)


def named_values(fun: Callable[..., Any]) -> Callable[..., dict[str, np.ndarray]]:
    """Returns a function that computes all that :func:`jaxmp.parity` compares, by name.

    Store it (``np.savez("before.npz", **values)``), and compare with it in another
    environment, after an upgrade, or on another machine. Arrays that come from
    elsewhere have the same keys: the path of a module, with slashes or dots, for its
    output, and ``result`` for that of the function. ``path:in`` is what goes into the
    module; without it, a line before the module counts as one of it. Further outputs
    and inputs are ``path:1`` and ``path:in1``, and further calls ``path#2``.

    Args:
        fun: Function that JAX can trace.

    Returns:
        A function of the arguments of ``fun`` that returns NumPy arrays; those of
        bfloat16 and 8 bits as float32, which ``npz`` can store.

    Examples:
        >>> def model(x):
        ...     with jax.named_scope("head"):
        ...         return 2 * x
        >>> values = jaxmp.named_values(model)(jnp.ones(3))
        >>> values.keys()
        dict_keys(['head', 'result'])
        >>> jaxmp.parity(values, model)(jnp.ones(3)).first is None
        True
    """
    check_function("named_values", fun, "named_values(f)", _PASS_IT)

    @functools.wraps(fun, updated=())
    def named(*args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        program = Compared(fun, args, kwargs)
        crossings = program.crossings
        seen = program.compiled({i: x.type.dtype for i, x in crossings.items()})(FREE)
        found = {}
        for place, slots in slots_of(program).items():
            for i, slot in enumerate(slots):
                array = seen[slot.source].at(slot.iteration)
                if array is not None:
                    is_narrow = array.dtype.kind == "V" or array.dtype.itemsize < 2
                    is_narrow = is_narrow and jnp.issubdtype(array.dtype, jnp.floating)
                    array = array.astype(np.float32) if is_narrow else array
                    found[key_of(place, i)] = array
        return found

    return uncalled("named_values", fun, named)


def _stored(x: Any) -> Mapping[str, Any] | None:
    """Returns arrays that are stored, None for what is no dict and no file."""
    if isinstance(x, (str, os.PathLike)) and str(x).endswith(".npz"):
        with np.load(x) as file:
            return dict(file)
    if not isinstance(x, Mapping):
        return None
    for key, value in x.items():
        kind = getattr(value, "dtype", None)
        if not (isinstance(key, str) and kind is not None and hasattr(value, "shape")):
            raise TypeError(
                "`parity` takes a dict of arrays by the path of their module, but "
                f"under {short(key)} there is {describe(value)}. Pass for example "
                '`{"block_0/mlp": array, "result": array}`.'
            )
    return x


def _check(names: Any, band: Any) -> None:
    if names is not None and not (
        isinstance(names, Mapping)
        and all(isinstance(x, str) for pair in names.items() for x in pair)
    ):
        raise TypeError(
            "`names` must be a dict of paths, but is "
            f'{describe(names)}. Pass for example `names={{"h/0": "block_0"}}`.'
        )
    check_positive("band", band, "Pass for example `band=0.01`.")


def _devices(devices: Sequence[Any] | None, count: int) -> list[Any]:
    """Returns the device of each function, None for that of its arguments."""
    if devices is None:
        return [None] * count
    is_several = isinstance(devices, (tuple, list)) and len(devices) == count
    if not is_several or not all(isinstance(x, (str, jax.Device)) for x in devices):
        raise ValueError(
            f"`devices` must have one for each function, {count} of them, but is "
            f'{describe(devices)}. Pass for example `devices=("cpu", "gpu")`.'
        )
    return [jax.devices(x)[0] if isinstance(x, str) else x for x in devices]


class Comparison:
    """Two programs that have run, and how far values are apart at each crossing."""

    def __init__(
        self,
        programs: Sequence[Compared],
        stored: Mapping[str, Any] | None,
        names: Mapping[str, str] | None,
    ):
        """Runs the last program, and the first unless the reference was stored."""
        self.program, first = programs[-1], programs[0]
        slots = slots_of(first) if stored is None else slots_of_stored(stored)
        self.pairs = pairs = Pairs(slots, self.program, names)
        if not pairs.slots:
            raise ValueError(_nothing(pairs, programs))
        self.theirs: list[dict[int, Seen]] = []  # as it runs, and for each draw
        if stored is None:
            run = first.compiled({x.source: x.dtype for x in pairs.slots.values()})
            self.theirs = [run(FREE)]
            self.theirs += [run(draw, self.theirs[0]) for draw in DRAWS]
        given = {number: self._given(number) for number, _ in pairs.slots}
        run = self.program.compiled({i: x.array.dtype for i, x in given.items()})
        self.free, self.forced = run(FREE), run(FORCED, given)
        self.draws = [run(draw, given) for draw in DRAWS]
        self.errors = {key: self._errors(key) for key in pairs.slots}
        self.results = [x.results() for x in programs]

    def _values(self, slot: Slot) -> list[Any]:
        """Returns a value of the reference in each run, None where there is none."""
        if not self.theirs:
            return [slot.source]
        return [x[slot.source].at(slot.iteration) for x in self.theirs]

    def _given(self, number: int) -> Seen:
        """Returns the values of the reference at a crossing."""
        x, slots = self.program.crossings[number], self.pairs.slots
        keys = [(number, i) for i in np.ndindex(x.loops) if (number, i) in slots]
        found = {i: self._values(slots[number, i])[0] for _, i in keys}
        found = {i: value for i, value in found.items() if value is not None}
        dtype = np.result_type(*[y.dtype for y in found.values()] or [x.type.dtype])
        given = np.zeros((*x.loops, *x.type.shape), dtype), np.zeros(x.loops, bool)
        for i, value in found.items():
            given[0][i], given[1][i] = value, True
        return Seen(*given)

    def report(self, log_probs: bool, band: float) -> ParityReport:
        rows = [*self._rows()]
        only = [tuple("/".join(x) for x in paths) for paths in self.pairs.only]
        return ParityReport(
            first=next((x for x in rows if x.differs), None),
            modules=tuple(_merged(rows)),
            outputs=tuple(self._outputs(log_probs, band)),
            reference_only=only[0],
            other_only=only[1],
            band=float(band),
            log_probs=log_probs,
            notes=(*self.pairs.notes, *self._nameless(), *self.program.notes),
        )

    def _nameless(self) -> Iterator[str]:
        """Says what names there are where none is in both."""
        if not self.pairs.paths and any(self.pairs.only):
            theirs, ours = map(spelled, self.pairs.only)
            yield (
                f"no module is in both: the reference has {theirs}, the other {ours}. "
                'Pass `names={"path in the reference": "path in the other"}`'
            )

    def _rows(self) -> Iterator[ModuleParity]:
        """Yields a row for each value that was compared, in order."""
        crossings, paths = self.program.crossings, self.pairs.paths
        for number, index in sorted(self.pairs.slots, key=self._order):
            x, found = crossings[number], self.errors[number, index]
            if found is not None:
                free, added, typical = found
                path = whole = path_at(x.blamed.path, index)
                while path and path not in paths and x.blamed != BACKWARD:
                    path = path[:-1]  # to what both programs have
                visit = f"#{x.blamed.visit}" * (x.blamed.visit > 1)
                yield ModuleParity(
                    path="/".join(path) + visit * (path == whole),
                    reference="/".join(paths.get(path, path)),
                    handed=self._handed(x.blamed, index),
                    error=free,
                    added=added,
                    typical=typical,
                    value=_value_of(x, index),
                    where=x.where,
                )

    def _order(self, key: Key) -> tuple[int, ...]:
        x = self.program.crossings[key[0]]
        loops = (n for pair in zip(x.order, key[1], strict=False) for n in pair)
        return (*loops, *x.order[len(key[1]) :])

    def _errors(self, key: Key) -> tuple[float, float, float] | None:
        """Returns the errors of a pair: as it runs, what is added, and by rounding."""
        number, index = key
        ours = [x[number].at(index) for x in (self.free, self.forced, *self.draws)]
        values = self._values(self.pairs.slots[key])
        if any(x is None for x in (*ours, *values)):
            return None
        (free, forced, *draws), (theirs, *moved) = ours, values
        size = _size(theirs)
        own = max(_apart(x, forced) for x in draws)
        # Of what was stored nobody knows.
        other = max((_apart(x, theirs) for x in moved), default=own)
        typical = float(np.hypot(own, other))
        if jnp.issubdtype(forced.dtype, jnp.inexact):
            eps = [jnp.finfo(x.dtype).eps for x in (forced, theirs)]
            typical = max(typical, float(max(eps)) * size)
        errors = _apart(free, theirs), _apart(forced, theirs), typical
        return tuple(_relative(x, size) for x in errors)  # pyright: ignore

    def _handed(self, call: Any, index: Any) -> float:
        """Returns the largest error of what goes into a call."""
        every = self.program.crossings.values()
        ins = (x for x in every if x.kind == IN and x.call == call)
        keys = [(x.number, index[: len(x.loops)]) for x in ins]
        found = [self.errors.get(self.pairs.alias.get(key, key)) for key in keys]
        return max((x[0] for x in found if x is not None), default=0.0)

    def _outputs(self, log_probs: bool, band: float) -> Iterator[OutputParity]:
        """Yields how far results are apart, as ``jax.jit`` computes them."""
        for name, (their, slot) in self.pairs.results.items():
            x = self.results[0][their] if self.theirs else slot.source
            y = self.results[-1][name]
            is_exact = not jnp.issubdtype(x.dtype, jnp.inexact)
            apart, size = _differences(y, x), max(x.size, 1) ** 0.5
            away = float(np.linalg.norm(apart))
            far = apart > (0 if is_exact else band * _size(x) / size)
            by_token = None
            if log_probs and x.ndim and not is_exact:
                with np.errstate(invalid="ignore", over="ignore"):
                    ratios = np.expm1(_wide(y) - _wide(x))
                    far = (apart > 0) & ~(np.abs(ratios) <= band)
                squares = np.mean(apart**2, axis=tuple(range(x.ndim - 1)))
                by_token = tuple(map(float, np.sqrt(squares)))
            outside = float(np.mean(far)) if x.size else 0.0
            yield OutputParity(
                name=name,
                size=x.size,
                error=outside if is_exact else _relative(away, _size(x)),
                rms=away / size,
                largest=float(np.max(apart, initial=0)),
                outside=outside,
                by_token=by_token,
            )


def _nothing(pairs: Pairs, programs: Sequence[Compared]) -> str:
    """Returns what to say of programs of which nothing can be compared."""
    results = [
        ", ".join(
            f"{x.type.dtype}{[*x.type.shape]}"
            for x in program.crossings.values()
            if x.kind == RESULT
        )
        for program in programs
    ]
    theirs, ours = map(spelled, pairs.only)
    return (
        "`parity` found nothing to compare: results of one shape or modules of one "
        f"name. They return {' and '.join(results)}. The reference has {theirs}, and "
        f'the other {ours}. Pass `names={{"path in the reference": "path in the '
        'other"}`.'
    )


def _value_of(x: Crossing, index: Any) -> str:
    name = "/".join(path_at(x.call.path, index))
    if x.kind == RESULT:
        return f"`{x.name}`"
    if x.kind == NAMED:
        return "this value"
    return f"what goes into `{name}`" if x.kind == IN else "its output"


def _merged(rows: Sequence[ModuleParity]) -> list[ModuleParity]:
    """Returns a row for each module: the first that differs, or is furthest off."""
    best: dict[str, ModuleParity] = {}
    for x in rows:
        y = best.setdefault(x.path, x)
        if not y.differs and (x.differs or x.added > y.added):
            best[x.path] = x
    return [x for x in rows if best[x.path] is x]


def _wide(x: Any) -> Any:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _size(x: Any) -> float:
    """Returns the norm of an array, of integers the root of their number."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return float(x.size) ** 0.5
    x = _wide(x)
    return float(np.linalg.norm(x[np.isfinite(x)]))


def _differences(x: Any, y: Any) -> Any:
    """Returns how far numbers are apart, ``inf`` where one of them is not finite.

    Integers that differ are 1 apart.
    """
    if not jnp.issubdtype(y.dtype, jnp.inexact):
        return (x != y).astype(float)
    x, y = _wide(x), _wide(y)
    is_same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):  # of infinities
        apart = np.where(is_same, 0, np.abs(x - y))
    return np.where(np.isnan(apart), np.inf, apart)


def _apart(x: Any, y: Any) -> float:
    """Returns the norm of a difference."""
    return float(np.linalg.norm(_differences(x, y)))


def _relative(away: float, size: float) -> float:
    return away / size if size else away and np.inf
