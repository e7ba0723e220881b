"""The matmuls and convolutions of a compiled program, as its kernels run them."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from .text import Computation, arrays, bits

PRODUCTS = {
    "__cublas$": "matmul",
    "__cudnn$conv": "convolution",
    "dot": "matmul",
    "convolution": "convolution",
}


class Product(NamedTuple):
    """A matrix product or a convolution."""

    name: str
    target: str  # the library call, or the operation
    shapes: tuple[str, str, str]  # of two operands and the result
    attributes: str

    @property
    def is_float8(self) -> bool:
        """Whether both operands have 8 bits."""
        return all(bits(arrays(shape)[0][0]) == 8 for shape in self.shapes[:2])

    def flops(self) -> float:
        """Returns twice the numbers that it multiplies."""
        lhs, rhs, result = map(_sizes, self.shapes)
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


def products_of(body: Computation, computations) -> Iterator[Product]:
    """Yields the matrix products and convolutions of a kernel."""
    for instruction in body.instructions.values():
        target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
        opcode = target[1] if target else instruction.opcode
        for kind, name in PRODUCTS.items():
            if opcode.startswith(kind):
                lhs, rhs = (
                    body.instructions[x].shape for x in instruction.operands[:2]
                )
                shapes = lhs, rhs, instruction.shape
                yield Product(name, opcode, shapes, instruction.attributes)
        for called in instruction.called("calls"):
            yield from products_of(computations[called], computations)


def _sizes(shape: str) -> list[int]:
    """Returns the sizes of an array, or of the first of a tuple."""
    found = re.search(r"\[([\d,]*)\]", shape)
    return [int(n) for n in found[1].split(",") if n] if found else []
