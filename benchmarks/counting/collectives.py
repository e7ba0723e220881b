"""What devices send each other, read off a program that XLA has partitioned.

The collectives inside a loop count as often as the loop runs, and each counts what a
ring sends per device and step: of n devices in a group and S bytes of the whole array

    all-reduce 2 S (n-1)/n     all-gather, reduce-scatter, all-to-all S (n-1)/n

An all-reduce of which each device keeps its slice alone counts as the reduce-scatter
into which compilers for GPU and TPU turn it.
"""

import collections
import math
import pathlib
import re
import tempfile
from typing import Any, NamedTuple

from jaxmp._compiled.text import BRANCHES, CALLS, WAITS, arrays, bits, parse, trip_count

from .measure import IN_A_HURRY

# What a ring of n devices sends, over the bytes of a device's result.
RINGS = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,  # the result is a part
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}


class Collective(NamedTuple):
    """An array that devices exchange."""

    kind: str
    dtype: str  # as XLA spells it
    size: int  # numbers in the result of one device
    times: int  # how often it runs
    devices: int  # in a group
    sliced: bool  # whether each device uses nothing but its slice of the result
    name: str  # of the operation, which may exchange others at once

    @property
    def sent(self) -> float:
        """The bytes that a device sends."""
        share = RINGS[self.kind](self.devices) / (1 + self.is_scattered_sum)
        return self.times * self.size * bits(self.dtype) / 8 * share

    @property
    def is_scattered_sum(self) -> bool:
        """Whether compilers for GPU and TPU would make it a reduce-scatter."""
        return self.sliced and self.kind == "all-reduce"


def partitioned(jitted: Any, *args: Any) -> str:
    """Returns the program of one device, as XLA's partitioner leaves it."""
    with tempfile.TemporaryDirectory() as folder:
        jitted.lower(*args).compile(
            compiler_options=IN_A_HURRY  # it is read and not run
            | {
                "xla_dump_to": folder,
                "xla_dump_hlo_pass_re": "spmd.*",
                "xla_dump_hlo_as_text": True,
            }
        )
        (dump,) = pathlib.Path(folder).glob("*after_spmd-partition*")
        return dump.read_text()


def sent_bytes(program: str) -> dict[str, float]:
    """Returns the bytes that a device sends, by kind and dtype of the collective."""
    sent: dict[str, float] = collections.defaultdict(float)
    for c in collectives(program):
        kind = "reduce-scatter" if c.is_scattered_sum else c.kind
        sent[f"{kind} {c.dtype}"] += c.sent
    return dict(sorted(sent.items()))


def launches(program: str) -> dict[str, int]:
    """Returns how often each kind of collective runs, for however many arrays."""
    times = {(c.kind, c.name): c.times for c in collectives(program)}
    found = collections.Counter[str]()
    for (kind, _), n in times.items():
        found[kind] += n
    return dict(sorted(found.items()))


def collectives(program: str) -> list[Collective]:
    """Returns what the devices exchange when they run a program.

    Args:
        program: Text, from :func:`partitioned` or ``compiled.as_text()``.

    Returns:
        One :class:`Collective` for each array. Of a conditional, those of all branches.

    Raises:
        ValueError: If it is not plain how often a loop runs, or with how many devices.
    """
    computations, entry = parse(program)
    partitions = re.search(r"num_partitions=(\d+)", program)
    everyone = int(partitions[1]) if partitions else 1
    found = []

    def run(name, times):
        lines = computations[name].instructions.values()
        for line in lines:
            if line.opcode == "while":
                (body,) = line.called("body")
                run(body, times * trip_count(line, computations))
            elif line.opcode in ("call", "conditional"):
                for called in line.called(*CALLS, *BRANCHES):
                    run(called, times)
            elif line.opcode in RINGS:
                sliced = _readers(line, lines) == {"dynamic-slice"}
                devices = _group_size(line) or everyone
                for dtype, size in arrays(line.shape):
                    what = line.opcode, dtype, size, times, devices, sliced
                    found.append(Collective(*what, line.name))

    run(entry, 1)
    return found


def _readers(line, lines):
    """Returns the opcodes of what reads a result, where it has been waited for."""
    found = set()
    for user in lines:
        if line.name in user.operands:
            waits = user.opcode in WAITS
            found |= _readers(user, lines) if waits else {user.opcode}
    return found


def _group_size(collective):
    """Returns how many devices take part together, 0 where that are all."""
    _, _, groups = collective.attributes.partition("replica_groups=")
    if not groups or groups.startswith("{}"):
        return 0
    if found := re.match(r"\{\{([\d,]+)\}", groups):  # {{0,1},{2,3}}
        return found[1].count(",") + 1
    if found := re.match(r"\[\d+,(\d+)\]", groups):  # [2,4]<=[8]
        return int(found[1])
    # mesh['a'=2,'b'=4] {'b'}
    if found := re.match(r"mesh\[([^\]]*)\][^{]*\{([^}]*)\}", groups):
        sizes = dict(re.findall(r"('\w+')=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in found[2].split(","))
    raise ValueError(f"`{collective.name}` has unknown groups: {groups[:80]}")
