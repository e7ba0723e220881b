"""Named scopes for the modules of NNX and Equinox, which give themselves none.

While a function is traced, each call of a module is in the scope of the attributes by
which its caller reaches it: ``Net``, inside of it ``blocks/0``, inside of that
``attention``. For that the methods of the classes are replaced by ones that open a
scope, and put back afterwards. Other threads may run them meanwhile: where no tracing
of ours is around a call, they do what they did.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import jax

Scopes = tuple[str, ...]
# Around a module in one of the same name, with its depth: no repetition.
INSIDE = "jaxmp.inside."


@contextlib.contextmanager
def module_scopes(tree: Any) -> Iterator[None]:
    """Gives calls of modules their scopes; ``tree`` holds those known by their class.

    What is in no module of ``tree``, nor in the one that calls it, such as a model that
    ``nnx.merge`` has made, has the name of its class.
    """
    kinds = _module_types()
    if not kinds:
        yield
        return
    callers = _callers.get()
    starts = (((type(x).__name__,), x) for _, x in _modules_in(tree, kinds))
    given = _Reach(starts, callers[-1].scopes if callers else ())
    with _scoped_methods(x for _, x in given.found):
        token = _callers.set((*callers, given))
        try:
            yield
        finally:
            _callers.reset(token)


class _Reach:
    """The modules that can be reached by attributes, each by the shortest path."""

    def __init__(self, starts: Iterable[tuple[Scopes, Any]], scopes: Scopes = ()):
        """Starts from some modules; ``scopes`` are those around their calls."""
        self.starts, self.scopes = list(starts), scopes

    @functools.cached_property
    def found(self) -> list[tuple[Scopes, Any]]:
        """All modules with their paths; while they are held no id is used again."""
        found, kinds = list(self.starts), _module_types()
        seen = {id(module) for _, module in found}
        for path, module in found:  # which grows
            for name, value in vars(module).items():
                for inner, x in _modules_in(value, kinds):
                    if id(x) not in seen:
                        seen.add(id(x))
                        found.append(((*path, str(name), *inner), x))
        return found

    @functools.cached_property
    def paths(self) -> dict[Any, Scopes]:
        """By which attributes a module is reached, by its ``id`` or its table."""
        by_id: dict[int, Scopes] = {}
        by_table: dict[int, Scopes] = {}
        tables = collections.Counter(_table(module) for _, module in self.found)
        for path, module in self.found:
            by_id[id(module)] = path
            table = _table(module)
            if table is not None and tables[table] == 1:  # clones have it in common
                by_table[table] = path
        return by_table | by_id

    def starts_with(self, module: Any) -> bool:
        """Whether a module is the one that begins here, or what Flax made of it."""
        return any(
            x is module or _table(x) == _table(module) is not None
            for path, x in self.starts
            if not path
        )


# Who is calling: the arguments of a function, then a module, then one in it.
_callers: contextvars.ContextVar[tuple[_Reach, ...]] = contextvars.ContextVar(
    "callers", default=()
)


def _module_types() -> tuple[type, ...]:
    # Who has a module has imported its library.
    found = (sys.modules.get(name) for name in ("flax.nnx", "equinox"))
    return tuple(filter(None, (getattr(library, "Module", None) for library in found)))


def _modules_in(tree: Any, kinds: tuple[type, ...]) -> Iterator[tuple[Scopes, Any]]:
    """Yields the outermost modules in a pytree with their paths."""
    entries = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kinds))
    for path, x in entries:
        if isinstance(x, kinds):
            yield tuple(jax.tree_util.keystr((key,), simple=True) for key in path), x


def _table(module: Any) -> int | None:
    """Returns what a module has in common with what Flax makes of it.

    In `nnx.remat`, `nnx.jit` and their like a module is another object, with the same
    table of its attributes. One without attributes of its own has that of its class.
    """
    table = vars(module).get("_pytree__nodes")
    is_own = table is not getattr(type(module), "_pytree__nodes", None)
    return id(table) if is_own else None


# The methods of modules


_lock = threading.Lock()
_replaced: dict[type, tuple[int, dict[str, Any]]] = {}  # for how many, and by what


@contextlib.contextmanager
def _scoped_methods(modules: Iterable[Any]) -> Iterator[None]:
    """Makes the methods of classes open scopes.

    Those of all of NNX, as a function may build a model itself; of Equinox, where much
    else is a module, those of the given models.
    """
    kinds = _module_types()
    classes = {base for x in modules for base in type(x).__mro__}
    todo = [cls for cls in kinds if cls.__module__.startswith("flax")]
    for cls in todo:  # which grows
        todo.extend(cls.__subclasses__())
    classes = {x for x in classes | {*todo} if issubclass(x, kinds) and x not in kinds}
    with _lock:
        for cls in classes:
            count, methods = _replaced.get(cls, (0, {}))
            if not count:
                methods = {
                    name: _scoped(method)
                    for name, method in vars(cls).items()
                    if _is_method(name, method)
                }
                for name, method in methods.items():
                    setattr(cls, name, method)
            _replaced[cls] = count + 1, methods
    try:
        yield
    finally:
        with _lock:
            for cls in classes:
                count, methods = _replaced.pop(cls)
                if count > 1:
                    _replaced[cls] = count - 1, methods
                    continue
                for name, method in methods.items():
                    if vars(cls).get(name) is method:
                        setattr(cls, name, method.__wrapped__)


def _is_method(name: str, method: Any) -> bool:
    """Whether a part of a class is a method by which it is used."""
    if name != "__call__" and name.startswith("_"):
        return False
    is_bound = callable(method) and hasattr(method, "__get__")
    others = isinstance(method, (type, staticmethod, classmethod))
    is_abstract = getattr(method, "__isabstractmethod__", False)
    return is_bound and not others and not is_abstract


def _scoped(method: Any) -> Any:
    """Returns a method that opens the scope of its module."""

    @functools.wraps(method, updated=())
    def scoped(*args, **kwargs):
        callers, self = _callers.get(), args[0] if args else None
        is_call = callers and isinstance(self, _module_types())
        if not is_call or callers[-1].starts_with(self):
            return method(*args, **kwargs)
        keys = id(self), _table(self)
        paths = (x.paths.get(key) for x in reversed(callers) for key in keys)
        path = next(filter(None, paths), (type(self).__name__,))
        scopes = (*callers[-1].scopes, *path)
        if without_repeats(scopes) != scopes:  # one of the same name around it
            path = (f"{INSIDE}{len(scopes)}", *path)
            scopes = (*callers[-1].scopes, *path)
        token = _callers.set((*callers, _Reach([((), self)], scopes)))
        try:
            with jax.named_scope("/".join(path)):
                return method(*args, **kwargs)
        finally:
            _callers.reset(token)

    return scoped


def without_repeats(scopes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns ``a/b/c`` for ``a/b/a/b/c``.

    The backward pass of a remat or a cond has the scopes around it once more in each
    line, or once less, than the forward pass.
    """
    once: list[str] = []
    for scope in scopes:
        once.append(scope)
        for n in range(1, len(once) // 2 + 1):
            if once[-n:] == once[-2 * n : -n]:
                del once[-n:]
                break
    return tuple(once)
