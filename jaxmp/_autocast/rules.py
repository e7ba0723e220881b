"""The nine rules by which autocast decides. No value has a dtype that they do not give.

The page on autocast has them word for word, and the terms in which they are written.
"""

AS_WRITTEN, PRODUCT, FOLLOWS, JOINS, FLOAT32 = 1, 2, 3, 4, 5
DIGITS, KEPT, LOOP, ENDS = 6, 7, 8, 9

TERMS = {
    "matmul": "A *matmul* is a convolution, or a matrix product that adds up eight "
    "numbers or more in the forward pass, with its gradients, however it is written. A "
    "slice of its result, or of what elementwise operations make of it, counts as a "
    "result of its own.",
    "elementwise": "An *elementwise operation* is arithmetic, `tanh`, `sigmoid`, "
    "`erf`, `erfc`, `sin` or `cos`. Powers do not count, nor do factors above 256 or "
    "below 1/256. A number that 16 bits do not hold is applied in float32, and the "
    "result is rounded.",
    "move": "A *move* returns numbers of its arguments unchanged: a reshape, a slice, "
    "a lookup, `concatenate`, `where`, `max`, `clip`, `relu`, a max-pool, "
    "`x.at[i].set` and `x.at[i].max`. Sorting does not count. What a loop carries is a "
    "move of its first value and of what each iteration returns.",
    "leads": "A value *leads to a matmul* if a matmul reads it in the forward pass, "
    "directly or through moves and elementwise operations. For a gradient this means "
    "the backward pass. What a loop carries leads to one if its last value does too, "
    "or if nothing reads that.",
    "input": "An *input* is an argument of the function, such as a parameter, or what "
    "is computed from inputs without a matmul.",
    "sent back": "A gradient is *sent back by a matmul* if one returns it in the "
    "backward pass, or if arithmetic computes it from such gradients, without "
    "broadcasts, inputs and softmaxes.",
    "decides": "A loop *decides* by comparing if a `while_loop` ends by that, or if "
    "one truth value chooses, by a `where`, whether an array that it carries stays as "
    "it is, and a matmul of the next iteration reads what comes of that.",
}

RULES = {
    AS_WRITTEN: "A value that is not float32 in your code stays as you wrote it, and "
    "so does all that you keep in float32 by a region, a path, a denied operation or a "
    "`precision`.",
    PRODUCT: "A matmul rounds its arguments to 16 bits and adds in float32; it "
    "returns 16 bits if the result leads to another matmul, and float32 if not; a "
    "convolution rounds both.",
    FOLLOWS: "An elementwise operation runs in 16 bits if its arguments are 16-bit "
    "values or numbers in the code and its result leads to a matmul; a move keeps the "
    "dtype of its arguments.",
    JOINS: "A sum leading to a matmul is 16 bits if it adds an input to 16 bits, and "
    "rounded in bfloat16 with other float32; `tanh`, `sigmoid`, `erf`, `erfc` are "
    "rounded behind matmuls, or for them alone.",
    FLOAT32: "Everything else is float32: exponentials, powers, smaller products, "
    "reductions, norms, losses, solvers, what enters or leaves a `custom_vjp` or "
    "`shard_map`, and whatever autocast does not know.",
    DIGITS: "A returned value, a divisor, and what a logarithm, exponential, root, "
    "solver, test of equality or unknown operation reads are float32, and so is "
    "everything from the last matmul or reduction up to them.",
    KEPT: "Results that only matmuls and the backward pass read are stored in 16 bits, "
    "except inputs and moves; so are summed gradients sent back by a matmul, and, in "
    "bfloat16, what scans stack.",
    LOOP: "What a loop hands to its next iteration without a matmul is float32, as are "
    "its factors; so are more than four gates, or parts of one value, that multiply "
    "one another, and their products.",
    ENDS: "A loop that decides by comparing results of matmuls is float32, and so is "
    "what computes the numbers it is given to compare with, as are means of a number "
    "and its square that are subtracted.",
}

# Beside the rules, which give the dtypes of values, and not what a product does inside.
FLOAT8 = (
    "Under `mixed_fp8` a product of two large matrices rounds the bfloat16 that it "
    "takes further, to float8, with a scale for each of the two."
)
