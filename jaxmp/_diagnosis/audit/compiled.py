"""What the code that XLA has compiled for a GPU does, read off its text.

An audit of a function says what was asked for. XLA may do otherwise: it widens matmuls
that a GPU does not have, leaves out roundings, and falls back from a fused kernel.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._base.dtypes import is_narrow, is_wide
from ..._base.gpus import BFLOAT16, FLOAT8, Gpu, gpu_of
from ..._compiled.places import Lines, Running, runs, scopes_of
from ..._compiled.products import Kernel, products_in, target_of
from ..._compiled.text import (
    WAITS,
    Computation,
    Instruction,
    arrays,
    bits,
    bytes_of,
    dtype_name,
    parse,
    sizes_of,
)
from ..._jaxprs import scopes as _scopes
from ..._jaxprs.places import is_users
from .compiled_report import CompiledProduct, CompiledReport, LostRounding, WideArray
from .report import UnfusedAttention

_LARGE = 0.05  # of the temporary memory
# No kernels of their own: what is inside of the calls runs.
_NO_KERNELS = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while"),
    *("conditional", "call", "async-start", "after-all", *WAITS),
}
# These move numbers, and leave them as they are.
_MOVES = {"reshape", "transpose", "broadcast", "bitcast", "copy", "slice"}


class NotForGpuError(ValueError):
    """A program that is compiled for something else."""


class Device(NamedTuple):
    """For which device a program is compiled."""

    platform: str  # "gpu", or empty if nobody knows
    kind: str
    gpu: Gpu | None = None  # if it is one of NVIDIA

    @property
    def name(self) -> str:
        """Its name, with the capability."""
        return str(self.gpu or self.kind)

    def lacks(self, capability: tuple[int, int]) -> bool:
        """Whether it is known to be older."""
        return self.gpu is not None and self.gpu.capability < capability


def audit_compiled(program: jax.stages.Compiled | jax.stages.Lowered) -> CompiledReport:
    """Reads what a compiled program does, and compares with what it was made from."""
    is_lowered = isinstance(program, jax.stages.Lowered)
    compiled = program.compile() if is_lowered else program
    device = _device_of(compiled)
    if device.platform not in ("", "gpu", "cuda", "rocm"):
        raise NotForGpuError(
            "`audit` reads code for a GPU, but this program is compiled for "
            f"`{device.platform}`, whose code says nothing of a GPU's. Compile it for "
            "the GPU, or type `jaxmp.audit(fun)(*args)`, which reads the function."
        )
    text = compiled.as_text() or ""
    asked = program.as_text("hlo", debug_info=True) if is_lowered else None
    try:
        analysis: Any = compiled.memory_analysis()
        memory = analysis.temp_size_in_bytes
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        memory = None
    return read(text, asked, device, memory)


def read(
    text: str, asked: str | None, device: Device, memory: int | None
) -> CompiledReport:
    """Returns the report of a text.

    Args:
        text: The compiled program.
        asked: The program before XLA, None if it is not known.
        device: For which it is compiled.
        memory: Bytes of its temporary memory, None if they are not known.
    """
    code = _Code(text)
    before = _Code(asked) if asked is not None else None
    flops = code.flops()
    why = "cuDNN has none before compute capability 8.0" * device.lacks(BFLOAT16)
    notes = [
        f"the loop `{name}` does not say how often it runs, and counts once"
        for name in sorted(code.unknown)
    ]
    if not device.kind:
        notes.append("the program does not say for which device it was compiled")
    if before is None:
        notes.append(
            "a `Compiled` does not hold what was asked for: pass the `Lowered` to see "
            "which roundings XLA took away"
        )
    return CompiledReport(
        flops=flops,
        device=device.name,
        products=tuple(code.by_line()),
        asked=before.flops() if before else None,
        lost_roundings=tuple(_lost(before, code)) if before else None,
        attention=tuple(code.written_out(why, device.name)),
        wide_arrays=tuple(code.wide_arrays(memory)) if memory else (),
        temporary_bytes=memory,
        calls=code.calls(),
        why=tuple(_why(code, flops, device)),
        notes=tuple(notes),
    )


def _device_of(compiled: Any) -> Device:
    """Returns the device that the shardings of arguments and results name."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    for sharding in shardings:
        for device in sorted(sharding.device_set, key=lambda device: device.id):
            return Device(device.platform, device.device_kind, gpu_of(device))
    return Device("", "")


def _why(code: _Code, flops: Mapping[str, float], device: Device) -> Iterator[str]:
    """Yields what a GPU does not have, where that may be why it is not 16-bit."""
    name = device.name
    if "float32" in flops and device.lacks(BFLOAT16):
        yield (
            f"{name} has no bfloat16 matmuls: XLA computes them in float32. Type "
            '"mixed_float16".'
        )
    narrowest = min((jnp.dtype(x).itemsize for x in flops), default=1)
    if narrowest > 1 and device.lacks(FLOAT8) and re.search(r"\bf8e\w+\[", code.text):
        yield (
            f"{name} has no float8 matmuls: XLA multiplies the rounded numbers in "
            "another dtype. Type the policy without float8."
        )
    fused = any(p.name == "attention" for _, p in code.products)
    if fused and device.lacks(BFLOAT16):
        yield (
            f"{name} does not have cuDNN's attention, which this code calls: it fails "
            "when it runs. Leave out `implementation`."
        )


class _Code:
    """A program, what runs in it, and where that comes from."""

    def __init__(self, text: str):
        self.text = text
        self.computations, entry = parse(text)
        self.entry = self.computations[entry]
        self.lines = Lines(text)
        self.unknown: set[str] = set()
        self.runs = [*runs(self.computations, entry, self.unknown)]
        self.products = [
            (run, product) for run in self.runs for product in self._products(run)
        ]

    def _products(self, run: Running) -> Iterator[Kernel]:
        x = run.instruction
        if x.opcode in _NO_KERNELS:
            return
        for product in products_in(x, run.computation, self.computations):
            if jnp.issubdtype(jnp.dtype(_wider(product)), jnp.inexact):
                yield product

    def place(self, instruction: Instruction, around: str = "") -> tuple[str, str]:
        """Returns the module and the line of an instruction."""
        name = f"{around}/{instruction.op_name}".strip("/")
        module = _scopes.module_of(scopes_of(name))
        users = (frame for frame in self.lines.of(instruction) if is_users(frame[0]))
        file, line = next(users, ("", 0))
        return module, f"{file}:{line}" if file else ""

    def origin(self, instruction: Instruction, run: Running) -> tuple[str, str]:
        """Returns the module and the line of an instruction in a kernel.

        What XLA has made of others has none, and gets that of what it reads.
        """
        around = [x.instructions for x in self._bodies(run.instruction)]
        body = next((x for x in around if instruction.name in x), {})
        for instructions, first in (
            (body, instruction),
            (run.computation.instructions, run.instruction),
        ):
            pending = [first]
            for x in pending:
                module, where = self.place(x)
                if module or where:
                    return module, where
                read = [
                    instructions[name] for name in x.operands if name in instructions
                ]
                pending += [y for y in read if y not in pending]
        return "", ""

    def _bodies(self, instruction: Instruction) -> Iterator[Computation]:
        """Yields the computations in a fusion."""
        if instruction.opcode == "fusion":
            for name in instruction.called("calls"):
                yield self.computations[name]
                for x in self.computations[name].instructions.values():
                    yield from self._bodies(x)

    def flops(self) -> dict[str, float]:
        """Returns the FLOPs by dtype, the most first."""
        found: Any = collections.Counter()
        for run, product in self.products:
            found[_wider(product)] += run.times * product.flops()
        return dict(found.most_common())

    def by_line(self) -> Iterator[CompiledProduct]:
        """Yields the products of each line, the most FLOPs first."""
        count: collections.Counter[Any] = collections.Counter()
        flops: Any = collections.Counter()
        targets: dict[Any, set[str]] = collections.defaultdict(set)
        for run, product in self.products:
            key = product.name, _wider(product), *self.origin(product.instruction, run)
            count[key] += run.times
            flops[key] += run.times * product.flops()
            targets[key].add(product.target)
        for key, some in flops.most_common():
            (operation, dtype, *place), calls = key, tuple(sorted(targets[key]))
            yield CompiledProduct(operation, calls, dtype, count[key], some, *place)

    def calls(self) -> dict[str, int]:
        """Returns the targets of calls that are no products, and how often they run."""
        known = {id(product.instruction) for _, product in self.products}
        found: collections.Counter[str] = collections.Counter()
        for run in self.runs:
            for x in self._inside(run.instruction):
                if x.opcode == "custom-call" and id(x) not in known:
                    found[target_of(x)] += run.times
        return dict(sorted(found.items()))

    def _inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields an instruction, and those of a fusion."""
        yield instruction
        for body in self._bodies(instruction):
            yield from body.instructions.values()

    def written_out(self, why: str, device: str) -> Iterator[UnfusedAttention]:
        """Yields attentions in more than one kernel: of a batched matmul's softmax."""
        found: dict[tuple[str, str], int] = {}
        for run, product in self.products:
            if not _is_batched(product):
                continue
            for operand in run.instruction.operands:
                weights = run.computation.instructions[operand].shape
                if _size(weights) and self._is_softmax_of_scores(operand, run):
                    place = self.origin(product.instruction, run)
                    size = run.times * bytes_of(weights)
                    found[place] = max(found.get(place, 0), size)
        for (module, where), size in found.items():
            yield UnfusedAttention(why, size, module, where, device)

    def _is_softmax_of_scores(self, name: str, run: Running) -> bool:
        """Whether a value is made by maximum and exponential of a batched matmul's."""
        body = run.computation.instructions
        size = _size(body[name].shape)
        found, has, pending = False, set(), [name]
        seen = set()
        while pending:
            name = pending.pop()
            if name in seen or name not in body:
                continue
            seen.add(name)
            x = body[name]
            made = [p for r, p in self.products if r.instruction is x]
            if made:
                found |= _is_batched(made[0]) and _size(made[0].shapes[2]) == size
                continue
            for inside in (body, *(y.instructions for y in self._bodies(x))):
                one = [x] if inside is body else inside.values()
                has.update(*(self._softmax_part(y, inside, size) for y in one))
            pending += x.operands
        return found and has == {"exponential", "maximum"}

    def _softmax_part(
        self, x: Instruction, body: Mapping[str, Instruction], size: int
    ) -> list[str]:
        """Returns which part of a softmax of so many scores an instruction is."""
        if x.opcode == "exponential" and _size(x.shape) == size:
            return ["exponential"]
        if x.opcode == "reduce" and _size(body[x.operands[0]].shape) == size:
            of = [self.computations[name] for name in x.called("to_apply")]
            return [y.root_opcode for y in of if y.root_opcode == "maximum"]
        return []

    def wide_arrays(self, memory: int) -> Iterator[WideArray]:
        """Yields float32 arrays that are large beside the temporary memory."""
        root = self.entry.behind(self.entry.root)
        names = root.operands if root.opcode == "tuple" else [root.name]
        results = {self._array_of(self.entry, name) for name in names}
        found: collections.Counter[Any] = collections.Counter()
        for run in self.runs:
            for i, (x, shape) in enumerate(self._written(run.instruction)):
                is_result = run.computation is self.entry and (
                    (run.instruction.name, i) in results
                )
                dtype = dtype_name(arrays(shape)[0][0])
                size = bytes_of(shape)
                if not is_result and _is_wide(dtype) and size >= _LARGE * memory:
                    place = self.origin(x, run)
                    found[size, dtype, tuple(sizes_of(shape)), *place] += 1
        for (size, dtype, shape, *place), n in sorted(found.items(), reverse=True):
            yield WideArray(dtype, shape, n, size, size / memory, *place)

    def _array_of(self, computation: Computation, name: str) -> tuple[str, int]:
        """Returns which instruction writes an array, and which of its results it is."""
        x = computation.behind(name)
        if x.opcode == "get-tuple-element":
            index = re.search(r"index=(\d+)", x.attributes)
            return computation.behind(x.operands[0]).name, int(index[1] if index else 0)
        return x.name, 0

    def _written(self, instruction: Instruction) -> Iterator[tuple[Instruction, str]]:
        """Yields each array that a kernel writes, behind what computes it."""
        if instruction.opcode in _NO_KERNELS or not arrays(instruction.shape):
            return
        if instruction.opcode != "fusion":
            for shape in re.findall(r"\w+\[[\d,]*\]", instruction.shape):
                yield instruction, shape
            return
        body = self.computations[instruction.called("calls")[0]]
        root = body.behind(body.root)
        for name in root.operands if root.opcode == "tuple" else [root.name]:
            x = body.behind(name)
            if x.opcode != "broadcast":  # what fills a buffer: it is written later
                yield x, body.instructions[name].shape
            else:
                yield x, "pred[]"


def _lost(before: _Code, code: _Code) -> Iterator[LostRounding]:
    """Yields the casts to fewer bits and back that the compiled code does not have."""
    kept = {
        (x.op_name, arrays(x.shape)[0][0])
        for computation in code.computations.values()
        for x in computation.instructions.values()
        if x.op_name and arrays(x.shape)
    }
    count: collections.Counter[Any] = collections.Counter()
    numbers: collections.Counter[Any] = collections.Counter()
    for x, computation, _, around in before.runs:
        if x.opcode != "convert":
            continue
        narrow = arrays(x.shape)[0][0]
        source = computation.behind(x.operands[0])
        rounds = is_narrow(jnp.dtype(dtype_name(narrow)))
        rounds = rounds and bits(arrays(source.shape)[0][0]) > bits(narrow)
        if not (rounds and _is_widened(x, computation)):
            continue
        names = (f"{around}/{y.op_name}".strip("/") for y in (x, source))
        if any((name, narrow) in kept for name in names):
            continue
        key = dtype_name(narrow), *before.place(x, around)
        count[key] += 1
        numbers[key] += _size(x.shape)
    for (dtype, *place), some in numbers.most_common():
        yield LostRounding(dtype, count[dtype, *place], some, *place)


def _is_widened(cast: Instruction, computation: Computation) -> bool:
    """Whether something casts the result of a cast back to more bits."""
    pending = [cast.name]
    narrow = bits(arrays(cast.shape)[0][0])
    while pending:
        name = pending.pop()
        for user in computation.instructions.values():
            if name not in user.operands:
                continue
            if user.opcode == "convert" and bits(arrays(user.shape)[0][0]) > narrow:
                return True
            if user.opcode in _MOVES:
                pending.append(user.name)
    return False


def _wider(product: Kernel) -> str:
    return dtype_name(max(product.dtypes, key=bits))


def _is_wide(dtype: str) -> bool:
    try:
        return is_wide(jnp.dtype(dtype))
    except TypeError:  # a token
        return False


def _is_batched(product: Kernel) -> bool:
    pattern = r'lhs_batch_dim(ension)?s"?[:=][\[{]"?\d'
    return product.name == "matmul" and bool(re.search(pattern, product.attributes))


def _size(shape: str) -> int:
    """Returns the numbers in an array, or in the first of a tuple."""
    found = arrays(shape)
    return found[0][1] if found else 0
