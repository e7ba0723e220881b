"""Bytes, kernels and dtypes, counted in programs that can be counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.counting import hlo, targets
from benchmarks.counting.collectives import collectives, sent_bytes
from jaxmp._compiled.products import products_of
from jaxmp._compiled.text import parse

UNAVAILABLE = targets.unavailable()
needs_compiler = pytest.mark.skipif(bool(UNAVAILABLE), reason=str(UNAVAILABLE))


def program(entry, *computations):
    """Returns the text of a program, its computations given as name and lines."""
    return "\n".join(
        f"{'ENTRY ' * (name == 'main')}%{name} (p: f32[]) -> f32[] {{\n{lines}\n}}\n"
        for name, lines in [*computations, ("main", entry)]
    )


ADD = (
    "add",
    """  %a = f32[100]{0} parameter(0)
  %b = f32[100]{0} parameter(1)
  ROOT %sum = f32[100]{0} add(%a, %b)""",
)


def test_a_fusion_moves_its_operands_and_its_result():
    entry = """  %x = f32[100]{0} parameter(0), metadata={op_name="x"}
  %y = f32[100]{0} parameter(1)
  ROOT %z = f32[100]{0} fusion(%x, /*index=1*/%y), kind=kLoop, calls=%add"""
    work = hlo.work(program(entry, ADD))
    assert (work.bytes, work.kernels) == (12 * 100, 1)
    assert not work.copies
    assert not work.products


def test_what_is_read_twice_moves_once():
    entry = """  %x = f32[100]{0} parameter(0)
  ROOT %z = f32[100]{0} fusion(%x, %x), kind=kLoop, calls=%add"""
    assert hlo.work(program(entry, ADD)).bytes == 8 * 100


def test_what_was_behind_a_barrier_is_the_array_before_it():
    entry = """  %x = f32[100]{0} parameter(0)
  %held = (f32[100]{0}, f32[]) tuple(%x, %x)
  %y = f32[100]{0} get-tuple-element(%held), index=0
  ROOT %z = f32[100]{0} fusion(%x, %y), kind=kLoop, calls=%add"""
    assert hlo.work(program(entry, ADD)).bytes == 8 * 100


def test_a_slice_reads_and_an_update_in_place_writes_a_part():
    body = (
        "body",
        """  %buffer = f32[100]{0} parameter(0)
  %source = f32[1000]{0} parameter(1)
  %i = s32[] parameter(2)
  %part = f32[10]{0} dynamic-slice(%source, %i), dynamic_slice_sizes={10}
  %flat = f32[100]{0} bitcast(%buffer)
  ROOT %new = f32[100]{0} dynamic-update-slice(%flat, %part, %i)""",
    )
    entry = """  %x = f32[100]{0} parameter(0)
  %y = f32[1000]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %z = f32[100]{0} fusion(%x, %y, %i), kind=kLoop, calls=%body"""
    read, written, index = 4 * 10, 4 * 10, 4
    assert hlo.work(program(entry, body)).bytes == read + written + index


def test_a_loop_counts_as_often_as_it_runs():
    body = (
        "body",
        """  %t = (s32[], f32[100]{0}) parameter(0)
  %x = f32[100]{0} get-tuple-element(%t), index=1
  %i = s32[] get-tuple-element(%t), index=0
  %y = f32[100]{0} fusion(%x, %x), kind=kLoop, calls=%add
  ROOT %u = (s32[], f32[100]{0}) tuple(%i, %y)""",
    )
    entry = """  %t = (s32[], f32[100]{0}) parameter(0)
  ROOT %w = (s32[], f32[100]{0}) while(%t), condition=%c, body=%body"""
    known = ', backend_config={"known_trip_count":{"n":"7"}}'
    work = hlo.work(program(entry + known, ADD, body))
    assert (work.bytes, work.kernels) == (7 * 800, 7)
    with pytest.raises(ValueError, match="`w` does not say how often"):
        hlo.work(program(entry, ADD, body))


@pytest.mark.parametrize(
    "names",
    [
        "true_computation=%one, false_computation=%none",
        "branch_computations={%none, %one}",
    ],
)
def test_a_conditional_counts_as_its_dearest_branch(names):
    one = ("one", ADD[1].replace("ROOT %sum", "ROOT %s"))
    none = ("none", "  ROOT %a = f32[100]{0} parameter(0)")
    entry = f"""  %p = pred[] parameter(0)
  %x = f32[100]{{0}} parameter(1)
  ROOT %z = f32[100]{{0}} conditional(%p, %x, %x), {names}"""
    assert hlo.work(program(entry, one, none))[:2] == (1200, 1)


def test_copies_and_products_are_told_apart():
    entry = """  %x = f16[8,4]{1,0} parameter(0)
  %y = f16[4,2]{1,0} parameter(1)
  %c = f16[8,4]{0,1} copy(%x)
  %m = (f32[8,2]{1,0}, s8[9]) custom-call(%c, %y), custom_call_target="__cublas$gemm"
  ROOT %z = f32[8,2]{1,0} get-tuple-element(%m), index=0"""
    work = hlo.work(program(entry))
    assert work.copies == {"f16[8,4]{0,1}": 1}
    assert work.products == {"matmul f16 x f16 -> f32": 1}
    copied, multiplied = 2 * 64, 64 + 16 + 64  # and its workspace does not move
    assert (work.bytes, work.workspace) == (copied + multiplied, 9)


# As JAX 0.12 writes what runs beside the rest.
STARTED = {
    "fusion": "(({x}), {y}, u32[]) fusion-start(%x), kind=kLoop, calls=%f",
    "copy": "({y}, {x}, u32[]) copy-start(%x)",
    "all-gather": "({x}, {y}) all-gather-start(%x), dimensions={{0}}",
    "all-reduce": "{y} all-reduce-start(%x), to_apply=%f",
}


@pytest.mark.parametrize("update", ["", "-update"])
@pytest.mark.parametrize("opcode", STARTED)
def test_a_pair_is_one_operation(opcode, update):
    x, y = "f32[100]{0}", "f32[200]{0}"
    f = (
        "f",
        f"""  %a = {x} parameter(0)
  ROOT %c = {y} concatenate(%a, %a)""",
    )
    middle = f"  %m = {y} {opcode}{update}(%s)\n" if update else ""
    entry = f"""  %x = {x} parameter(0)
  %s = {STARTED[opcode].format(x=x, y=y)}
{middle}  %d = {y} {opcode}-done(%{"m" if update else "s"})
  ROOT %z = {y} negate(%d)"""
    work = hlo.work(program(entry, f))
    assert work.bytes == (400 + 800) + (800 + 800)
    assert work.kernels == 2
    assert len(work.copies) == (opcode == "copy")
    assert [c.size for c in collectives(program(entry, f))] == [200] * (
        opcode.startswith("all")
    )


def test_what_is_started_in_place_writes_a_part():
    body = (
        "body",
        """  %buffer = f32[100]{0} parameter(0)
  %part = f32[10]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %new = f32[100]{0} dynamic-update-slice(%buffer, %part, %i)""",
    )
    types = "((f32[100]{0}, f32[10]{0}, s32[]), f32[100]{0}, u32[])"
    entry = f"""  %x = f32[100]{{0}} parameter(0)
  %y = f32[10]{{0}} parameter(1)
  %i = s32[] parameter(2)
  %s = {types} fusion-start(%x, %y, %i), kind=kLoop, calls=%body
  ROOT %z = f32[100]{{0}} fusion-done(%s)"""
    work = hlo.work(program(entry, body))
    assert (work.bytes, work.kernels) == (40 + 4 + 40, 1)


def test_a_part_of_a_pair_that_another_iteration_started_is_no_kernel():
    entry = """  %t = (f32[100]{0}, u32[]) parameter(0)
  %s = u32[] get-tuple-element(%t), index=1
  ROOT %d = f32[100]{0} all-reduce-done(%s)"""
    assert hlo.work(program(entry))[:2] == (0, 0)


@pytest.mark.parametrize("result", ["f16[8,2]{1,0}", "s8[8,2]{1,0}"])
def test_the_workspace_of_a_library_call_in_a_fusion_does_not_move(result):
    body = (
        "body",
        f"""  %x = f16[8,4]{{1,0}} parameter(0)
  %y = f16[4,2]{{1,0}} parameter(1)
  %m = ({result}, s8[1024]{{0}}) custom-call(%x, %y), custom_call_target="__cublas$gemm"
  %n = {result} get-tuple-element(%m), index=0
  %w = s8[1024]{{0}} get-tuple-element(%m), index=1
  ROOT %t = ({result}, s8[1024]{{0}}) tuple(%n, %w)""",
    )
    entry = f"""  %x = f16[8,4]{{1,0}} parameter(0)
  %y = f16[4,2]{{1,0}} parameter(1)
  %f = ({result}, s8[1024]{{0}}) fusion(%x, %y), kind=kCustom, calls=%body
  ROOT %z = {result} get-tuple-element(%f), index=0"""
    work = hlo.work(program(entry, body))
    written = 16 * (1 if result.startswith("s8") else 2)
    assert (work.bytes, work.workspace) == (64 + 16 + written, 1024)


CONVOLUTION = 'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{}"'


@pytest.mark.parametrize(
    ("shapes", "call", "flops"),
    [
        (
            "f16[8,4,16] f16[8,16,2] f32[8,4,2]",
            """custom_call_target="__cublas$lt$matmul",
            backend_config={"lhs_contracting_dimensions":["2"]}""",
            2 * 8 * 4 * 16 * 2,
        ),
        (
            "f16[2,9,9,3] f16[5,3,3,3] f16[2,7,7,5]",
            CONVOLUTION.format("Forward"),
            2 * 2 * 7 * 7 * 5 * 3 * 3 * 3,
        ),
        (
            "f16[2,7,7,5] f16[5,3,3,3] f16[2,9,9,3]",
            CONVOLUTION.format("BackwardInput"),
            2 * 2 * 7 * 7 * 5 * 3 * 3 * 3,
        ),
        (
            "f16[2,9,9,3] f16[2,7,7,5] f16[5,3,3,3]",
            CONVOLUTION.format("BackwardFilter"),
            2 * 2 * 7 * 7 * 5 * 3 * 3 * 3,
        ),
    ],
    ids=["matmul", "convolution", "its input's gradient", "its kernel's gradient"],
)
def test_the_time_of_a_product_is_that_of_its_flops_or_of_its_bytes(
    shapes, call, flops
):
    lhs, rhs, out = shapes.split()
    entry = f"""  %x = {lhs} parameter(0)
  %y = {rhs} parameter(1)
  ROOT %m = ({out}, s8[64]) custom-call(%x, %y), {" ".join(call.split())}"""
    computations, name = parse(program(entry))
    (found,) = products_of(computations[name], computations)
    assert found.flops() == flops
    work = hlo.work(program(entry))
    assert work.seconds == hlo.roofline(work.bytes, flops) > 0


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("{}", 8),
        ("{{0,1},{2,3},{4,5},{6,7}}", 2),
        ("[2,4]<=[8]", 4),
        ("mesh['a'=4,'b'=2] {'b'}", 2),
        ("mesh['a'=2,'b'=2,'c'=2], device_ids=([2,4]T(1,0)) {'a','c'}", 4),
    ],
)
def test_a_collective_goes_over_its_group_of_devices(groups, devices):
    entry = f"""  %x = bf16[10,100]{{1,0}} parameter(0)
  ROOT %g = bf16[10,100]{{1,0}} all-gather(%x), replica_groups={groups}, others"""
    (found,) = collectives("HloModule m, num_partitions=8\n" + program(entry))
    assert found[:5] == ("all-gather", "bf16", 1000, 1, devices)
    assert found.sent == 2000 * (devices - 1) / devices


def test_a_group_of_devices_that_is_not_understood_is_refused():
    entry = "  ROOT %g = f32[] all-reduce(), replica_groups=all"
    with pytest.raises(ValueError, match="`g` has unknown groups: all"):
        collectives(program(entry))


def test_a_collective_in_a_loop_runs_as_often():
    body = ("body", "  ROOT %s = f32[8]{0} all-reduce(), replica_groups=[1,4]<=[4]")
    test = (
        "test",
        """  %n = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %n), direction=LT""",
    )
    entry = """  %t = f32[8]{0} parameter(0)
  ROOT %w = f32[8]{0} while(%t), condition=%test, body=%body"""
    (found,) = collectives(program(entry, body, test))
    assert (found.times, found.sent) == (3, 3 * 32 * 2 * 3 / 4)


def test_an_all_reduce_that_is_sliced_sends_what_a_reduce_scatter_does():
    entry = """  %x = f32[8]{0} parameter(0)
  %s = f32[8]{0} all-reduce(%x), replica_groups={{0,1,2,3}}
  ROOT %part = f32[2]{0} dynamic-slice(%s, %i), dynamic_slice_sizes={2}"""
    assert sent_bytes(program(entry)) == {"reduce-scatter f32": 32 * 3 / 4}


@needs_compiler
def test_real_programs_are_what_they_say():
    def compiled(fun, *args):
        return hlo.work(targets.compiled(fun, *args).as_text())

    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    half = jax.ShapeDtypeStruct((256, 256), jnp.float16)
    image = jax.ShapeDtypeStruct((8, 16, 16, 64), jnp.bfloat16)
    filters = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.bfloat16)
    assert compiled(jnp.add, x, x.update(dtype=jnp.float32))[:2] == (12 * x.size, 1)
    assert compiled(jnp.matmul, half, half).products == {"matmul f16 x f16 -> f16": 1}

    def conv(x, w):
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=dimensions
        )

    products = compiled(conv, image, filters).products
    assert products == {"convolution bf16 x bf16 -> bf16": 1}

    def loop(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c) @ c, None), x, length=5)[0]

    assert compiled(loop, x).products == {"matmul f32 x f32 -> f32": 5}


@needs_compiler
def test_what_a_loop_of_matmuls_stacks_is_what_it_writes():
    def loop(w, xs):
        return jax.lax.map(lambda x: x @ w, xs)

    w = jax.ShapeDtypeStruct((256, 256), jnp.float16)
    xs = jax.ShapeDtypeStruct((8, 256, 256), jnp.float16)
    work = hlo.work(targets.compiled(loop, w, xs).as_text())
    slices = 8 * 2 * w.size
    read_and_written, copied, zeros = 3 * slices, 4 * slices, slices
    assert work.products == {"matmul f16 x f16 -> f16": 8}
    # JAX 0.12 reads and writes the slices where they are; JAX 0.10 copies them.
    moved = read_and_written + zeros + (copied if jax.__version_info__ < (0, 12) else 0)
    assert moved <= work.bytes < 1.01 * moved
