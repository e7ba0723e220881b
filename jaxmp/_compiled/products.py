"""The matmuls, convolutions and fused attentions of a compiled program.

A library call is known by its target, and a matmul of Triton, or of cuDNN in a fusion,
by the ``dot`` in that fusion. What other targets do is not known.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .text import Computation, Instruction, arrays, sizes_of

# By the operation, or by the target of a library call.
PRODUCTS = {
    r"__cublas\$(gemm|lt\$)": "matmul",
    r"__cudnn\$conv": "convolution",
    r"(dot|scaled-dot)$": "matmul",
    r"convolution$": "convolution",
    r"__cudnn\$fmha": "attention",
}


class Kernel(NamedTuple):
    """A matmul, a convolution, or an attention in one kernel."""

    name: str
    target: str  # the library call, or the operation
    shapes: tuple[str, str, str]  # of two operands and the result
    attributes: str
    instruction: Instruction

    @property
    def dtypes(self) -> tuple[str, str]:
        """Those of the operands of the call, as XLA spells them."""
        lhs, rhs = (arrays(shape)[0][0] for shape in self.shapes[:2])
        return lhs, rhs

    def flops(self) -> float:
        """Returns twice the numbers that it multiplies."""
        lhs, rhs, result = map(sizes_of, self.shapes)
        if self.name == "attention":
            # cuDNN computes the scores again in the backward pass.
            times = 5 if "Backward" in self.target else 2
            return 2.0 * times * self._scores() * lhs[-1]
        if self.name == "matmul":
            pattern = r'lhs_contracting_dim(?:ension)?s"?[:=][\[{]([^\]}]*)[\]}]'
            found = re.search(pattern, self.attributes)
            contracted = re.findall(r"\d+", found[1]) if found else []
            return 2.0 * math.prod(result) * math.prod(lhs[int(i)] for i in contracted)
        # The layer that it belongs to has an output and a kernel.
        output, kernel = result, rhs
        if "Backward" in self.target:
            output, kernel = (lhs, rhs) if "Input" in self.target else (rhs, result)
        labels = re.search(r"dim_labels=\w+_(\w+)->", self.attributes)
        features = kernel[labels[1].index("o")] if labels else 1
        return 2.0 * math.prod(output) * math.prod(kernel) / features

    def _scores(self) -> int:
        """Returns how many scores an attention has."""
        pattern = r'"intermediate_tensor_shape": ?\{.*?"dimensions": ?\[([^\]]*)\]'
        found = re.search(pattern, self.attributes)
        return math.prod(map(int, re.findall(r"\d+", found[1]))) if found else 0


def target_of(instruction: Instruction) -> str:
    """Returns the target of a library call, or else the name of the operation."""
    found = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return found[1] if found else instruction.opcode


def products_of(
    body: Computation, computations: Mapping[str, Computation]
) -> Iterator[Kernel]:
    """Yields the products of a kernel."""
    for instruction in body.instructions.values():
        yield from products_in(instruction, body, computations)


def products_in(
    instruction: Instruction, body: Computation, computations: Mapping[str, Computation]
) -> Iterator[Kernel]:
    """Yields the products of an instruction, more than one if it is a fusion."""
    target = target_of(instruction)
    for kind, name in PRODUCTS.items():
        if re.match(kind, target):
            lhs, rhs = (body.instructions[x].shape for x in instruction.operands[:2])
            shapes = lhs, rhs, instruction.shape
            yield Kernel(name, target, shapes, instruction.attributes, instruction)
    for called in instruction.called("calls"):
        yield from products_of(computations[called], computations)
