"""The ten rules by which autocast decides. No value has a dtype that they do not give.

*16-bit work* is a matrix product or convolution, and whatever rule 3 runs in 16 bits.
*Given* is an argument or a constant, and what is looked up or computed from such alone.
"""

AS_WRITTEN, PRODUCT, FOLLOWS, JOINS, FLOAT32 = 1, 2, 3, 4, 5
DIGITS, KEPT, LOOP, OFFSET, ENDS = 6, 7, 8, 9, 10

RULES = {
    AS_WRITTEN: "What you keep in float32 (a region, a path, a denied operation), and "
    "what is not float32, stays as it was written.",
    PRODUCT: "A matrix product or a convolution takes 16 bits and adds up in float32; "
    "it returns 16 bits if 16-bit work reads the result, and its float32 sums if not.",
    FOLLOWS: "Elementwise work, a choice or a move runs in 16 bits if all of its "
    "operands have 16 bits, or are numbers in the code, and 16-bit work reads the "
    "result.",
    JOINS: "A sum of 16 bits and of something in float32 is made in float32, and "
    "rounded once if 16-bit work reads it; in float16, which ends at 65504, only if "
    "the float32 one was given.",
    FLOAT32: "Everything else is float32: sums, norms, losses, and whatever autocast "
    "does not know.",
    DIGITS: "What is returned, and what a logarithm, an exponential, a root, a solver, "
    "a divisor or a test of equality reads, keeps its digits, back to the product that "
    "it is made of.",
    KEPT: "What a product takes, and otherwise only the backward pass reads, is stored "
    "in 16 bits, and so is what products have sent back and the backward pass both "
    "sums up and hands on.",
    LOOP: "A loop carries float32 where no product stands between one trip and the "
    "next, and what multiplies such a value is float32.",
    OFFSET: "Where something given is added, and a difference, a ratio or the negative "
    "is made of that, the sum is float32.",
    ENDS: "A loop that ends by comparing numbers that products computed, and means of "
    "a number and of its square, are float32.",
}

# Beside the rules, which give the dtypes of values, and not what a product does inside.
FLOAT8 = (
    "Under `mixed_fp8` a product of two large matrices rounds the bfloat16 that it "
    "takes further, to float8, with a scale for each of the two."
)
