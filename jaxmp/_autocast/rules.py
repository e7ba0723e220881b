"""The five rules that bound what may be 16 bits, and the guards beside them.

What the rules do not allow is float32, and guards keep more in float32, never
less. ``docs/rules.md`` has them word for word, ``tests/autocast/sentences.md`` defines
their words, and ``tests/autocast/test_oracle.py`` holds every value to them.
"""

AS_WRITTEN, BETWEEN, FLOAT32, LOOPS, STORED = 1, 2, 3, 4, 5
GATES, COMPARING, MOMENTS = "gates", "data-dependent loop", "variance by moments"
CONSTANTS, RANGE = "loop constants", "float16 range"

Rule = int | str  # the number of a rule, or the name of a guard

SENTENCES = {
    AS_WRITTEN: "Values that are not float32 in your code, or that you keep in float32 "
    "by a region, a path, a denied operation or a `precision`, stay as you wrote them.",
    BETWEEN: "A matmul takes 16 bits and accumulates in float32; its result may be 16 "
    "bits if it feeds another matmul, and so may the results of arithmetic, "
    "activations and data movement on 16-bit values.",
    FLOAT32: "Everything else is float32: exponentials, logarithms, powers, "
    "reductions, norms, losses, and each value that is returned, is a divisor or "
    "needs full precision, back to the last matmul or reduction.",
    LOOPS: "A loop carry that reaches the next iteration without passing through a "
    "matmul is float32, and so are its multipliers, back to the nearest matmul, "
    "reduction or activation.",
    STORED: "A float32 result may be stored in 16 bits if only matmuls and the "
    "backward pass read it, and so may what a scan stacks for the backward pass alone, "
    "and gradients that are also summed.",
}

SAFEGUARDS = {
    GATES: "If more than four factors multiply one another (gates in a row, "
    "`cumprod`), those known to be at most 1, or parts of one value, are float32, and "
    "so are their products.",
    COMPARING: "A loop whose stopping test or step choice compares results of matmuls "
    "runs entirely in float32, and so does the code that computes the values that it "
    "is given to compare with.",
    MOMENTS: "Matmuls that average a number and its square, where the square of one "
    "mean is subtracted from the other mean, are float32.",
    CONSTANTS: "If a scan is not differentiated inside autocast, its iterations read "
    "in float32 the values that are the same for all of them.",
    RANGE: "In float16 a sum of a 16-bit value and a float32 value is float32, if that "
    "is neither an input nor a sum of inputs and 16-bit values, and so is what a scan "
    "stacks.",
}

# Beside the rules, which give the dtypes of values, and not what a product does
# inside.
FLOAT8 = (
    "Under `mixed_fp8` a product of two large matrices rounds its bfloat16 operands "
    "further, to float8, with a scale for each of the two."
)
