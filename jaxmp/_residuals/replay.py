"""Replaying a program so that it stores in eight bits what its backward pass reads."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation, Run
from .._jaxprs.replay import where_written
from .._ops.products import holds_product, is_matrix_product
from .eight_bits import Stored, stored
from .plan import IsLeft, Residuals, exact_of, leaves_out
from .scans import Stack, Store, read_by_scan

# Returns what stores a value. It is given what tells which values are stored in eight
# bits if some scopes more are left out; a program, and which eight bits.
StoreOf = Callable[[Callable[[IsLeft], set[Any]], Any, str], Store]
# That of who looks at a program, None where it runs. JAX traces anew for each.
STORE_OF = jax.make_user_context(None)


def with_narrow_residuals(run: Run, kind: str, paths: Sequence[str]) -> Run:
    """Returns ``run``, with what a backward pass reads stored in eight bits.

    Args:
        run: Runs a program.
        kind: Which eight bits.
        paths: Named scopes to leave out.
    """
    is_left = leaves_out(paths)

    def narrowed(jaxpr, arrays):
        if not _jaxpr.has_backward(jaxpr):
            return run(jaxpr, arrays)
        written = _jaxpr.trace(lambda *xs: run(jaxpr, xs), arrays)
        jaxpr = _jaxpr.trace(lambda *xs: _inlined(written, xs), arrays)

        def decided(others: IsLeft) -> set[Any]:
            both: IsLeft = lambda x: is_left(x) or others(x)  # noqa: E731
            return {*NarrowReplay(jaxpr, arrays, both, store).in_eight_bits()}

        store: Store = lambda _, x, how, *maker: stored(x, how, kind)  # noqa: E731
        if STORE_OF.value is not None:
            store = STORE_OF.value(decided, jaxpr, kind)
        return NarrowReplay(jaxpr, arrays, is_left, store).run()

    return narrowed


class NarrowReplay:
    """The replay of one jaxpr that holds a forward and a backward pass."""

    def __init__(
        self, jaxpr: Any, inputs: Sequence[Any], is_left: IsLeft, store: Store
    ):
        """Decides what is stored of a jaxpr with such inputs."""
        self.jaxpr, self.is_left, self.store = jaxpr, is_left, store
        body = _jaxpr.open_jaxpr(jaxpr)
        self.eqns = _jaxpr.live(jaxpr)
        given = [*body.constvars, *body.invars]
        values = [*_jaxpr.closed_consts(jaxpr), *inputs]
        self.env: dict[Any, Any] = dict(zip(given, values, strict=True))
        ahead = [eqn for eqn in self.eqns if not _jaxpr.is_transposed(eqn)]
        back = [eqn for eqn in self.eqns if _jaxpr.is_transposed(eqn)]
        # A second forward pass may read what a first backward pass has computed.
        given += [var for eqn in back for var in eqn.outvars]
        self.residuals = Residuals(ahead, given, is_left)
        exact = exact_of(back, is_left)
        self.stacks = dict(self._stacks(ahead, back, exact))
        read = {x for eqn in back for x in _jaxpr.variables(eqn.invars)}
        needed = [x for x in self.residuals.makers if x in read - self.stacks.keys()]
        self.residuals.decide(needed, exact)
        self.due = self._due()
        self.stored: dict[Any, Stored] = {}
        self.again = self.residuals.reader(
            self.stored, lambda x: None if self._crosses(x) else self.env[x]
        )
        self.sums: dict[Any, Any] = {}  # products that wait for the next stage
        self.wanted = {x for eqn in ahead for x in _jaxpr.variables(eqn.invars)}
        self.wanted.update(_jaxpr.variables(body.outvars))

    def _stacks(
        self, ahead: Sequence[Equation], back: Sequence[Equation], exact: set[Any]
    ) -> Iterator[tuple[Any, Stack]]:
        """Yields the scan behind each stacked value that a scan reads, by the value."""
        by_scan, others = set[Any](), set[Any]()
        for eqn in back:
            for i, x in enumerate(eqn.invars):
                if not isinstance(x, _jaxpr.Literal):
                    (by_scan if i in _places_of(eqn) else others).add(x)
        for eqn in ahead:
            if _jaxpr.call_kind(eqn) != "scan":
                continue
            inner = _jaxpr.open_jaxpr(eqn.params["jaxpr"]).outvars
            pairs = zip(eqn.outvars, inner, strict=True)
            stacked = itertools.islice(pairs, _jaxpr.scan_counts(eqn)[1], None)
            read = {
                x: x in others
                for x, y in stacked
                if x in by_scan and not isinstance(y, _jaxpr.Literal)
            }
            if read:
                stack = Stack(eqn, read, self.residuals.given, exact, self.is_left)
                yield from ((x, stack) for x in read)

    def _due(self) -> dict[int, list[Any]]:
        """Returns what is first read behind each product that begins a stage."""
        due: dict[int, list[Any]] = {}
        seen: set[Any] = set()
        stage: list[Any] = []
        for eqn in self.eqns:
            if not _jaxpr.is_transposed(eqn):
                continue
            for x in _jaxpr.variables(eqn.invars):
                if x in self.stacks:
                    continue
                new = [y for y in self.residuals.read_for(x) if y not in seen]
                seen.update(new)
                how = self.residuals.how
                stage += [y for y in new if how.get(y) in ("eight", "bits")]
            if self._begins_stage(eqn):
                due[id(eqn)] = stage = []
        return due

    def _begins_stage(self, eqn: Equation) -> bool:
        """Whether ``eqn`` sends a gradient back through a layer, or through several."""
        if not _is_product(eqn):
            return _jaxpr.call_kind(eqn) in _LAYERS and holds_product(eqn)
        return not any(map(self._crosses, eqn.invars))

    def _crosses(self, atom: Any) -> bool:
        """Whether a value crosses from the forward pass to the backward pass."""
        if isinstance(atom, _jaxpr.Literal) or atom in self.residuals.given:
            return False
        return atom in self.residuals.makers

    def in_eight_bits(self) -> Iterator[Any]:
        """Yields what is stored in eight bits, by its variable."""
        for one in (self, *self.stacks.values()):
            how = one.residuals.how
            yield from (x for x in how if how[x] == "eight")
        for eqn in filter(_jaxpr.holds_backward, self.eqns):
            for body in _jaxpr.call_layout(eqn).bodies:
                avals = _jaxpr.in_avals(body.jaxpr)
                inner = NarrowReplay(body.jaxpr, avals, self.is_left, self.store)
                yield from inner.in_eight_bits()

    def run(self) -> list[Any]:
        stacks: dict[tuple[int, int], Any] = {}
        for eqn in self.eqns:
            with _jaxpr.located_at(eqn, stacks), _jaxpr.context_of(eqn):
                if _jaxpr.is_transposed(eqn):
                    self.back(eqn)
                else:
                    self.ahead(eqn)
        return [self.value(x) for x in _jaxpr.open_jaxpr(self.jaxpr).outvars]

    def value(self, atom: Any) -> Any:
        """Returns a value as it was computed."""
        return atom.val if isinstance(atom, _jaxpr.Literal) else self.env[atom]

    def ahead(self, eqn: Equation) -> None:
        """Applies an equation of the forward pass, and stores what is saved of it."""
        ins = [self.value(x) for x in eqn.invars]
        stack = next((s for s in map(self.stacks.get, eqn.outvars) if s), None)
        if stack:
            outs = stack.run(ins, self.wanted, self.store)
        else:
            outs = self._entered(eqn, ins)
        for var, x in zip(eqn.outvars, outs, strict=True):
            self.env[var] = x
            if (how := self.residuals.how.get(var)) is not None:
                self.stored[var] = self.store(var, x, how, eqn)

    def back(self, eqn: Equation) -> None:
        """Applies an equation of the backward pass to what was stored."""
        stacks = {
            i: self.stacks[x]
            for i in _places_of(eqn)
            if not isinstance(x := eqn.invars[i], _jaxpr.Literal) and x in self.stacks
        }
        ins = [None if i in stacks else self.read(x) for i, x in enumerate(eqn.invars)]
        if stacks:
            outs = read_by_scan(eqn, ins, stacks, self.value)
        else:
            outs = _jaxpr.bind(eqn, ins)
        self.env.update(zip(eqn.outvars, outs, strict=True))
        if self._begins_stage(eqn):
            self.begin_stage(eqn)
        elif _is_product(eqn):
            self.sums[eqn.outvars[0]] = outs[0]

    def begin_stage(self, eqn: Equation) -> None:
        """Lets what follows wait for what belongs to the layers before.

        XLA would compute the gradients of all weights at the end, and what is computed
        again for the backward pass at the beginning, and keep it all in between.
        """
        # Those of a second forward pass are stored behind the first backward pass.
        due = [x for x in self.due.get(id(eqn), []) if x in self.stored]
        stored = [self.stored[x] for x in due]
        self.sums.update((var, self.env[var]) for var in eqn.outvars)
        values = list(self.sums.values())
        values, stored = lax.optimization_barrier((values, stored))
        self.env.update(zip(self.sums, values, strict=True))
        self.sums.clear()
        self.stored.update(zip(due, stored, strict=True))

    def read(self, atom: Any) -> Any:
        """Returns a value as the backward pass reads it."""
        stack = None if isinstance(atom, _jaxpr.Literal) else self.stacks.get(atom)
        return stack.read(atom, self.value) if stack else self.again(atom)

    def _entered(self, eqn: Equation, ins: Sequence[Any]) -> list[Any]:
        """Applies an equation, and goes inside if there is a backward pass in it."""
        if not _jaxpr.holds_backward(eqn):
            return _jaxpr.bind(eqn, ins)

        def replayed(jaxpr):
            return lambda *xs: NarrowReplay(jaxpr, xs, self.is_left, self.store).run()

        if _jaxpr.call_kind(eqn) == "shard_map":
            return _jaxpr.bind_shard_map(eqn, ins, replayed(eqn.params["jaxpr"]))
        bodies = [
            _jaxpr.trace(replayed(body.jaxpr), _jaxpr.in_avals(body.jaxpr))
            for body in _jaxpr.call_layout(eqn).bodies
        ]
        return _jaxpr.bind_bodies(eqn, ins, bodies)


def _inlined(jaxpr: Any, arrays: Sequence[Any]) -> list[Any]:
    """Replays a jaxpr, with the calls of ``jit`` in it written out."""

    def apply(eqn, ins):
        if _jaxpr.is_inlined(eqn):
            return _inlined(eqn.params["jaxpr"], ins)
        return _jaxpr.bind(eqn, ins)

    return _jaxpr.interpret(jaxpr, arrays, where_written(apply))


# Calls in which a layer, or several, are differentiated at once.
_LAYERS = frozenset({"remat", "scan", "while"})


def _is_product(eqn: Equation) -> bool:
    """Whether an equation is a product, or stands for one."""
    stands = _jaxpr.call_kind(eqn) in ("custom_jvp", "custom_vjp")
    return is_matrix_product(eqn) or (stands and holds_product(eqn))


def _places_of(eqn: Equation) -> range:
    """Returns at which inputs a scan takes an iteration's share."""
    if _jaxpr.call_kind(eqn) != "scan":
        return range(0)
    return range(sum(_jaxpr.scan_counts(eqn)), len(eqn.invars))
