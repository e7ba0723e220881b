"""Where an operation of a jaxpr stands: its module, the line behind it, what is around.

A line in JAX, in a library of layers or in Python's own is nobody's mistake; the line
that called it may be.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import math
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from . import jaxpr as _jaxpr
from . import scopes as _scopes

# File, line, position in the bytecode, columns of the expression, function.
Frame = tuple[str, int, int, tuple[int, int], str]

_JAX = os.path.dirname(jax.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
# These trace the bodies of calls that they have replayed.
_REPLAYS = tuple(
    os.path.join(_OWN, "_autocast", name) for name in ("customs.py", "emit.py")
)
# By these JAX comes to what it differentiates otherwise than to what it does not.
_TRACERS = re.compile(r"[/\\]_src[/\\](interpreters|core|pjit|api|custom_\w+)\b")
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_LIBRARIES = re.compile(
    r"[/\\](site|dist)-packages[/\\](flax|optax|haiku|equinox|chex|einops|jaxtyping|jaxlib)[/\\]"
    r"|^<frozen"
)
# These trace what is audited, so that they are around all of it.
_TRACING = tuple(
    os.path.join(_OWN, *path.split("/")) + ".py"
    for path in (
        "_diagnosis/audit/audit",
        "_diagnosis/explain/explain",
        "_diagnosis/overflow/overflow",
        "_diagnosis/parity/program",
        "_diagnosis/parity/parity",
        "_diagnosis/sensitivity/sensitivity",
        "_diagnosis/sensitivity/switches",
        "_jaxprs/flatten",
    )
)


class Place(NamedTuple):
    """Where an operation is: its surroundings, or its own place in them."""

    scopes: tuple[str, ...] = ()
    user: Frame | None = None  # innermost frame outside of all libraries
    author: Frame | None = None  # the same outside of JAX only
    shared: bool = False  # inside a function with the lines of another caller
    backward: bool = False
    times: int = 1  # how often this runs, 0 where nothing is counted
    opaque: str = ""  # the primitive around it that nothing is known of
    rematerialised: bool = False  # what it computes again counts apart
    again: bool = False  # in what a backward pass computes again
    step: int | None = None  # of a plan, where these are recorded
    steps: Sequence[Any] = ()  # that are recorded

    @property
    def module(self) -> str:
        """The named scopes, without our own marks."""
        return _scopes.module_of(self.scopes)

    @property
    def where(self) -> str:
        """The user's line as ``file:line``, empty if there is none."""
        return f"{self.user[0]}:{self.user[1]}" if self.user else ""

    @property
    def line(self) -> str:
        """The same without the file's folders."""
        return short_line(self.where)

    @property
    def code(self) -> str:
        """The expression of the user's line that it is of, empty if nobody knows."""
        if not self.user:
            return ""
        file, line, _, (start, end), _ = self.user
        source = linecache.getline(file, line).rstrip()
        code = source.encode()[start:end].decode(errors="ignore").strip()
        return f"{code} …" if code and end > len(source.encode()) else code

    @property
    def library(self) -> str:
        """The library of layers or optimizers that wrote the operation, or ours."""
        file = self.author[0] if self.author else ""
        if file.startswith(_OWN):
            return "jaxmp"
        found = _LIBRARIES.search(file)
        # A loss of optax is part of the model.
        is_loss = f"{os.sep}losses{os.sep}" in file
        return (found.group(2) or "") if found and not is_loss else ""

    @property
    def planned(self) -> Any:
        """The recorded step that it comes of, None if of none."""
        return None if self.step is None else self.steps[self.step]

    def is_in_line_of(self, other: Place | None) -> bool:
        """Whether one instruction of the user's stands behind both."""
        ours = self.scopes, self.user
        return other is not None and ours == (other.scopes, other.user)

    def is_in_call_of(self, other: Place | None) -> bool:
        """Whether one call of a function of JAX stands behind both."""
        ours = self.scopes, self.user, self.author
        return other is not None and ours == (other.scopes, other.user, other.author)

    def of(self, eqn: _jaxpr.Equation, before: Place) -> Place:
        """Returns the place of ``eqn`` in these surroundings.

        Some of JAX's own rules for ``grad`` write equations without a line. They
        belong to the equation before.
        """
        own = _jaxpr.scope_names(eqn)
        number = _scopes.named_in(own, _scopes.STEP)
        scopes = self.scopes + own
        if number is not None:
            scopes = tuple(x for x in scopes if not x.startswith(_scopes.STEP))
        step = self.step if number is None else int(number)
        user, author = self.user, self.author
        if not self.shared:
            planned = None if step is None else self.steps[step].eqn
            # What comes of a step may have been traced for another line, and kept.
            is_whole = planned is not None and not _jaxpr.call_kind(planned)
            found = _frames_of(planned if is_whole else eqn)
            user, author = found if found[0] else (user, found[1] or author)
            if found == (None, None):
                user, author = before.user, before.author
                scopes = before.scopes if scopes == self.scopes else scopes
        names = _jaxpr.names_of(eqn)
        again = self.again or (self.rematerialised and names.computed_again > 0)
        return self._replace(
            scopes=scopes,
            user=user,
            author=author,
            backward=(self.backward or names.transposed > 0) and not again,
            again=again,
            step=step,
        )

    def inside(self, eqn: _jaxpr.Equation, jaxpr: Any) -> Place:
        """Returns the surroundings of what is inside ``eqn``, which is here.

        What the backward pass of a ``jax.checkpoint`` computes again is forward work.
        """
        kind = _jaxpr.call_kind(eqn)
        # JAX's own jitted functions, and ours, are traced once, with the lines of the
        # first caller. Our own rules hold what is theirs, or a loop of the user's; and
        # a function that we have replayed is the user's.
        sharing = {"jit": (_JAX, _OWN), "custom_jvp": (_JAX,)}.get(kind, ())
        file = _jaxpr.function_of(jaxpr)[1].rpartition(":")[0]
        is_shared = file.startswith(sharing) and file not in _REPLAYS
        times = iteration_count(eqn)
        return self._replace(
            shared=self.shared or _jaxpr.chooses_platform(eqn) or is_shared,
            times=self.times * (1 if times is None else times),
            opaque=self.opaque or ("" if kind else eqn.primitive.name),
            rematerialised=self.rematerialised or _jaxpr.is_remat(eqn),
        )


def equations(
    jaxpr: Any,
    around: Place,
    bodies: Callable[[_jaxpr.Equation], Iterable[Any]] = _jaxpr.sub_jaxprs,
) -> Iterator[tuple[_jaxpr.Equation, Place]]:
    """Yields every equation of a jaxpr and of the bodies inside, and where it is."""
    place = around
    for eqn in _jaxpr.open_jaxpr(jaxpr).eqns:
        place = around.of(eqn, before=place)
        yield eqn, place
        for body in bodies(eqn):
            yield from equations(body, place.inside(eqn, body), bodies)


def caller() -> Frame | None:
    """Returns the innermost running frame outside of all libraries."""
    frame = sys._getframe()
    while frame and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    code = frame.f_code
    line, columns = _jaxpr.position(code, frame.f_lasti)
    return code.co_filename, line, frame.f_lasti, columns, code.co_qualname


def _frames_of(eqn: _jaxpr.Equation) -> tuple[Frame | None, Frame | None]:
    """Returns the innermost frames of ``eqn`` outside all libraries and outside JAX."""
    author = None
    for frame in _jaxpr.frames(eqn, is_wanted=_is_somebodys):
        author = author or frame
        if is_users(frame[0]):
            return frame, author
    return None, author


# What a user calls by name: the rest of a library is between that and the operation.
_CALLED_BY_NAME = re.compile(
    r"[/\\](jax[/\\]_src[/\\](nn|numpy|scipy|image)"
    r"|flax[/\\](linen|nnx[/\\]nn)|optax[/\\]losses)[/\\]"
)
_OPERATORS = re.compile(
    r"[/\\](array_methods|ufuncs|ufunc_api|lax_numpy|indexing|module|transforms|summary|util"
    r"|hijax|dtypes|tensor_contractions)\.py$"
)


def library_function(eqn: _jaxpr.Equation) -> str:
    """Returns the function of a library that the user's line calls, empty if none."""
    found = ""
    for file, *_, function in frames_below_users(eqn):
        function = function.partition(".<locals>")[0]
        if _CALLED_BY_NAME.search(file) and not _OPERATORS.search(file):
            found = found if function == "<lambda>" else function
    found = found.removesuffix(".__call__")
    return found.rpartition(".")[2].strip("_")


def frames_below_users(eqn: _jaxpr.Equation) -> tuple[Frame, ...]:
    """Returns the frames of libraries, from an operation to the user's line."""
    frames = _jaxpr.frames(eqn, is_wanted=lambda file: not _TRACERS.search(file))
    return tuple(itertools.takewhile(lambda frame: not is_users(frame[0]), frames))


def is_called_directly(eqn: _jaxpr.Equation) -> bool:
    """Whether the user's line calls JAX for an operation, and no other library."""
    return all(file.startswith(_JAX) for file, *_ in frames_below_users(eqn))


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file is neither JAX's nor another library's."""
    is_library = file.startswith(_OWN) or _LIBRARIES.search(file)
    return _is_somebodys(file) and not is_library


@functools.cache
def _is_somebodys(file: str) -> bool:
    """Whether a file is neither JAX's nor Python's, nor around all that is audited."""
    in_stdlib = file.startswith(_STDLIB) and "-packages" not in file
    return not (in_stdlib or file.startswith(_JAX) or file in _TRACING)


def iteration_count(eqn: _jaxpr.Equation) -> int | None:
    """Returns how often the body of an equation runs, None if nobody knows."""
    kind = _jaxpr.call_kind(eqn)
    if kind == "scan":
        return eqn.params["length"]
    if kind == "shard_map":  # on every device along its axes
        sizes = eqn.params["mesh"].shape
        return math.prod(sizes[axis] for axis in _jaxpr.manual_axes(eqn))
    return None if kind == "while" else 1


def short_line(where: str) -> str:
    """Returns ``file:line`` without folders, or the cell of a notebook and the line."""
    file, _, line = where.rpartition(":")
    cell = cell_of(file)
    return f"{cell}, line {line}" if cell else os.path.basename(where)


def cell_of(file: str) -> str:
    """Returns the name of the notebook's cell that IPython compiled under this name.

    Such a name says nothing, as ``/tmp/ipykernel_7/2844202223.py``. Empty for a file.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    named = getattr(getattr(shell, "compile", None), "format_code_name", None)
    found = named(file) if named else None  # ("Cell", "In[5]")
    return f"cell {found[1][3:-1]}" if found else ""
