"""The loss head of a language model as one operation, without an array of its logits.

A matmul by the vocabulary and a cross-entropy, a tile of rows at a time. The operation
has rules of its own for gradients, tangents, ``vmap`` and sharded operands.
"""
