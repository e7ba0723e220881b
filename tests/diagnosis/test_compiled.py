"""What an audit says of compiled code: of small texts, and of code for three GPUs."""

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxmp
from benchmarks.counting import targets
from benchmarks.counting.steps import loss_of
from benchmarks.networks.families import SMALL
from jaxmp.__main__ import main
from jaxmp._base.gpus import Gpu
from jaxmp._compiled.places import Lines, scopes_of
from jaxmp._compiled.text import parse
from jaxmp._diagnosis.audit.compiled import Device, read

UNAVAILABLE = targets.unavailable()
needs_compiler = pytest.mark.skipif(bool(UNAVAILABLE), reason=str(UNAVAILABLE))
A100 = Device("gpu", "NVIDIA A100", Gpu("NVIDIA A100", (8, 0)))


def jitted(fun, *args, gpu, **options):
    """Lowers a function for a GPU, with the options that compile it without one."""
    sharding = jax.sharding.SingleDeviceSharding(targets.devices(gpu)[0])
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    return jax.jit(fun, compiler_options=targets.OPTIONS | options).lower(*args)


class Net(nn.Module):
    """A convolution, an attention and dense layers, each with a line of its own."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(64, (3, 3), name="conv")(x)).reshape(len(x), -1, 64)
        attention = jaxmp.linen.dot_product_attention
        x += nn.MultiHeadDotProductAttention(2, attention_fn=attention, name="a")(x)
        x = nn.Dense(128, name="up")(x)
        return nn.Dense(16, name="head")(nn.gelu(x).mean(1))


def step(policy):
    net, x = Net(), jax.ShapeDtypeStruct((8, 16, 16, 64), jnp.float32)
    params = jax.eval_shape(net.init, jax.random.key(0), x)

    def loss(params, x):
        return (net.apply(params, x).astype(jnp.float32) ** 2).mean()

    return jaxmp.autocast(jax.grad(loss), policy), params, x


def test_names_of_jax_are_modules_without_transformations_and_loops():
    name = "jit(f)/jaxmp.autocast/transpose(jvp(Net))/while/body/closed_call/a/b/dot"
    assert scopes_of(name) == ("jaxmp.autocast", "Net", "a", "b")
    assert scopes_of("jit(f)/jit(<lambda>)/vmap(jvp())/cond/branch_0_fun/x/dot") == (
        "x",
    )
    assert scopes_of("dot_general") == ()


TABLES = """HloModule m

FileNames
1 "/home/me/train.py"
2 "{jax}"

FunctionNames
1 "step"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}}
2 {{file_name_id=2 function_name_id=1 line=99 end_line=99 column=1 end_column=2}}

StackFrames
1 {{file_location_id=1{none}}}
2 {{file_location_id=2 parent_frame_id={first}}}

"""


@pytest.mark.parametrize(("none", "first"), [("", 1), (" parent_frame_id=1", 2)])
def test_lines_are_read_from_both_forms_of_the_table(none, first):
    text = TABLES.format(jax=jax.__file__, none=none, first=first)
    text += "ENTRY %main () -> f32[] {\n  ROOT %x = f32[] constant(0), metadata={%s}\n}"
    for metadata, found in {
        "stack_frame_id=2": [(jax.__file__, 99), ("/home/me/train.py", 7)],
        "stack_frame_id=1": [("/home/me/train.py", 7)],
        'source_file="/home/me/a.py" source_line=3': [("/home/me/a.py", 3)],
    }.items():
        computations, entry = parse(text.replace("%s", metadata))
        # The attributes of a constant are its value, so read the line as an operation.
        x = computations[entry].instructions["x"]._replace(attributes=metadata)
        assert Lines(text).of(x) == found


def code(*lines, before="", tables=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"{tables}{before}\n\nENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}\n"


CONFIG = (
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"]}}}, metadata={op_name="jit(f)/a/dot_general"}'
)


@pytest.mark.parametrize(
    "target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"]
)
@pytest.mark.parametrize(("dtype", "name"), [("f32", "float32"), ("bf16", "bfloat16")])
def test_a_matmul_has_the_dtype_of_its_call(target, dtype, name):
    text = code(
        f"%x = {dtype}[8,4]{{1,0}} parameter(0)",
        f"%y = {dtype}[4,2]{{1,0}} parameter(1)",
        f"%m = (f32[8,2]{{1,0}}, s8[64]{{0}}) custom-call(%x, %y), "
        f'custom_call_target="{target}", {CONFIG}',
        "ROOT %z = f32[8,2]{1,0} get-tuple-element(%m), index=0",
    )
    report = read(text, None, A100, None)
    assert report.flops == {name: 2.0 * 8 * 4 * 2}
    (row,) = report.products
    assert row.targets == (target,)
    assert (row.operation, row.module, row.count) == ("matmul", "a", 1)
    assert report.fraction_16bit == (dtype == "bf16")
    assert not report.calls


APPLIED = "\n\n".join(
    f"""%{name} (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] {name}(%a, %b)
}}"""
    for name in ("add", "maximum")
)


@pytest.mark.parametrize("heads", [1, 4])
def test_a_softmax_of_what_is_pooled_of_scores_is_no_attention(heads):
    """A kernel returns the values by the scores of each head."""
    dot = "lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims"
    text = code(
        f"%q = bf16[{2 * heads},8,16]{{2,1,0}} parameter(0)",
        "%v = bf16[2,8,16]{2,1,0} parameter(1)",
        "%zero = f32[] constant(0)",
        f"%scores = f32[{2 * heads},8,8]{{2,1,0}} dot(%q, %q), {dot}={{2}}",
        f"%split = f32[2,{heads},8,8]{{3,2,1,0}} reshape(%scores)",
        "%pooled = f32[2,8,8]{2,1,0} reduce(%split, %zero), dimensions={1}, "
        "to_apply=%add",
        "%top = f32[2,8]{1,0} reduce(%pooled, %zero), dimensions={2}, "
        "to_apply=%maximum",
        "%tops = f32[2,8,8]{2,1,0} broadcast(%top), dimensions={0,1}",
        "%shifted = f32[2,8,8]{2,1,0} subtract(%pooled, %tops)",
        "%weights = f32[2,8,8]{2,1,0} exponential(%shifted)",
        f"ROOT %out = f32[2,8,16]{{2,1,0}} dot(%weights, %v), {dot}={{2}}",
        before=APPLIED,
    )
    assert len(read(text, None, A100, None).attention) == (heads == 1)


@pytest.mark.parametrize("kind", ["__triton_gemm", "__cudnn$fusion"])
def test_a_matmul_in_a_fusion_has_the_dtype_that_it_multiplies(kind):
    body = """%gemm (p0: f32[8,4], p1: f32[4,2]) -> f32[8,2] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = f32[4,2]{1,0} parameter(1)
  %c = bf16[8,4]{1,0} convert(%p0)
  %d = bf16[4,2]{1,0} convert(%p1)
  ROOT %dot = f32[8,2]{1,0} dot(%c, %d), lhs_contracting_dims={1}
}"""
    text = code(
        "%x = f32[8,4]{1,0} parameter(0)",
        "%y = f32[4,2]{1,0} parameter(1)",
        "ROOT %z = f32[8,2]{1,0} fusion(%x, %y), kind=kCustom, calls=%gemm, "
        f'backend_config={{"fusion_backend_config":{{"kind":"{kind}"}}}}',
        before=body,
    )
    assert read(text, None, A100, None).flops == {"bfloat16": 128.0}


@pytest.mark.parametrize(
    ("line", "dtype", "says"),
    [
        ("%m = f32[8,8]{1,0} dot(%x, %x)", "f32", "has no bfloat16 matmuls"),
        ("%m = f16[8,8]{1,0} dot(%x, %x)", "f16", ""),
        ("%m = f16[8,8]{1,0} dot(%x, %x), x=f8e4m3fn[8,8]", "f16", "no float8 matmuls"),
        ("%m = f8e5m2[8,8]{1,0} dot(%x, %x)", "f8e5m2", ""),
        (
            '%m = (f16[8,8]{1,0}, u8[0]) custom-call(%x, %x), "dimensions": ["8"], '
            'custom_call_target="__cudnn$fmhaSoftmax"',
            "f16",
            "does not have cuDNN's attention",
        ),
    ],
)
def test_what_an_old_gpu_does_not_have_is_said_with_what_to_type(line, dtype, says):
    text = code(f"%x = {dtype}[8,8]{{1,0}} parameter(0)", f"ROOT {line}")
    old = Device("gpu", "Tesla T4", Gpu("Tesla T4", (7, 5)))
    new = Device("gpu", "NVIDIA B200", Gpu("NVIDIA B200", (10, 0)))
    found = read(text, None, old, None).why
    assert len(found) == bool(says)
    assert all(says in why and re.search("Type|Leave out", why) for why in found)
    for device in (new, Device("gpu", "gfx90a"), Device("", "")):
        assert not read(text, None, device, None).why


def test_a_call_that_is_not_known_is_listed():
    calls = ["__cublas$triangularSolve", "xla.gpu.triton", "cusolver_getrf_ffi"]
    text = code(
        "%x = f32[8,8]{1,0} parameter(0)",
        *(
            f'%c{i} = f32[8,8]{{1,0}} custom-call(%x), custom_call_target="{name}"'
            for i, name in enumerate(calls)
        ),
        "ROOT %z = f32[8,8]{1,0} add(%c0, %c1)",
    )
    report = read(text, None, A100, None)
    assert report.calls == dict.fromkeys(sorted(calls), 1)
    assert report.flops == {}
    for name in calls:
        assert f"1 x {name}" in str(report)


def test_a_loop_that_does_not_say_how_often_it_runs_counts_once_with_a_note():
    text = code(
        "%t = f32[8,8]{1,0} parameter(0)",
        "ROOT %w = f32[8,8]{1,0} while(%t), condition=%test, body=%body",
        before="""%body (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %dot = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}
}

%test (p: f32[8,8]) -> pred[] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %b = pred[] custom-call(%p), custom_call_target="c"
}""",
    )
    report = read(text, None, A100, None)
    assert report.flops == {"float32": 1024.0}
    assert "the loop `w` does not say how often it runs" in str(report)


def test_a_program_that_names_no_device_says_so():
    report = read(code("ROOT %x = f32[] parameter(0)"), None, Device("", ""), None)
    assert "in the code for an unknown device" in str(report)
    assert "does not say for which device" in str(report)
    assert str(report).startswith("no matmul")


def test_code_for_a_cpu_is_refused(capsys, tmp_path):
    x = jnp.ones((8, 8))
    lowered = jax.jit(jnp.matmul).lower(x, x)
    for program in (lowered, lowered.compile()):
        with pytest.raises(ValueError, match="compiled for `cpu`"):
            jaxmp.audit(program)
    path = tmp_path / "square.py"
    path.write_text(
        "import jax.numpy as jnp\n"
        "def square(x): return x @ x\n"
        "def example(): return jnp.ones((8, 8))\n"
    )
    words = ["audit", "--compiled", f"{path}:square", "--args", f"{path}:example"]
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "compiled for `cpu`" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--fail-on-hazards"])
    assert "Type two commands" in capsys.readouterr().err


# The dtype in which a GPU runs what a policy asks for.
RUNS = {
    ("t4", "mixed_bfloat16"): "float32",
    ("t4", "mixed_float16"): "float16",
    ("a100", "mixed_bfloat16"): "bfloat16",
    ("h200", "mixed_float16"): "float16",
}


@needs_compiler
@pytest.mark.parametrize(("gpu", "policy"), RUNS)
def test_a_step_has_the_dtype_that_the_gpu_runs(gpu, policy):
    fun, *args = step(policy)
    lowered = jitted(fun, *args, gpu=gpu)
    report = jaxmp.audit(lowered)
    runs = RUNS[gpu, policy]
    products = [row for row in report.products if row.operation != "attention"]
    assert {row.dtype for row in products} == {runs}
    modules = {row.module.partition("/")[2].partition("/")[0] for row in products}
    assert modules == {"conv", "a", "up", "head"}
    assert all(re.search(r"(test_compiled|linen)\.py:\d+$", x.where) for x in products)
    assert set(report.asked) == {policy.removeprefix("mixed_")}
    assert not report.calls
    text = str(report)
    assert f"compute capability {targets.devices(gpu)[0].compute_capability}" in text
    widened = "has no bfloat16 matmuls" in text and '"mixed_float16"' in text
    assert widened == (runs == "float32")
    if gpu != "t4":
        assert report.fraction_16bit == 1
        assert not report.wide_arrays or "float32[" in text


TEN = ("gpt", "llama", "vit", "convnext", "resnet", "u-net", "lstm", "state space",
       "mlp", "bert")  # fmt: skip


@needs_compiler
@pytest.mark.evidence
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", TEN)
def test_the_products_of_a_network_are_found_as_they_were_asked_for(name, policy):
    network = SMALL[name]
    x, y = network.shapes()
    variables = jax.eval_shape(network.model.init, jax.random.key(0), x)
    stats = variables.get("batch_stats", {})
    grad_fn = jaxmp.autocast(
        jax.value_and_grad(loss_of(network.model.apply), has_aux=True), policy
    )
    args = variables["params"], stats, x, y
    report = jaxmp.audit(jitted(grad_fn, *args, gpu="h200"))
    written = jaxmp.audit(grad_fn)(*args)
    assert not report.calls
    assert report.fraction_16bit == pytest.approx(written.fraction_16bit, abs=0.02)
    asked, total = sum(report.asked.values()), sum(report.flops.values())
    assert total == pytest.approx(asked, rel=0.1)
    assert all(row.where for row in report.products if row.flops > 0.01 * total)


@needs_compiler
def test_the_page_shows_what_the_audit_of_its_program_says():
    page = Path(jaxmp.__file__).parents[1] / "docs" / "audit.md"
    text = page.read_text()
    names = {"__name__": "page"}
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S):
        if "loss_fn" in block[1] or "import jax" in block[1]:
            above = "\n" * text[: block.start(1)].count("\n")
            exec(compile(above + block[1], str(page), "exec"), names)
    lowered = jitted(names["fast"], names["weights"], names["tokens"], gpu="t4")
    section = text.split("## In the compiled code")[1]
    shown = re.search(r"^```text\n(.*?)^```", section, re.M | re.S)[1]
    said = str(jaxmp.audit(lowered)).partition("\n\n")[0]
    assert without_numbers(said) == without_numbers(shown)


def without_numbers(text):
    """Returns words: counts differ by the version of XLA."""
    return re.sub(r"\d[\d.,]*", "0", text).split()


@needs_compiler
def test_a_compiled_program_says_what_its_lowered_says():
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    lowered = jitted(jnp.matmul, x, x, gpu="t4")
    one, two = jaxmp.audit(lowered), jaxmp.audit(lowered.compile())
    assert one.products == two.products
    assert one.asked == {"bfloat16": 2.0 * 256**3}
    assert two.asked is two.lost_roundings is None
    assert one.flops == {"float32": 2.0 * 256**3}
    assert one.as_dict()["fraction_16bit"] == 0
    assert str(one).startswith("0.0% of matmul and convolution FLOPs in 16 bits")


@needs_compiler
def test_roundings_that_xla_takes_away_are_seen_and_those_that_it_keeps_are_not():
    def fun(x, w):
        with jax.named_scope("gone"):
            h = jnp.sin(x).astype(jnp.bfloat16).astype(jnp.float32)
            g = (h * 8).astype(jnp.float8_e4m3fn).astype(jnp.float32)
        with jax.named_scope("kept"):
            h = jax.lax.reduce_precision(h @ w, 8, 7)
            h = jax.lax.optimization_barrier(h.astype(jnp.float16)).astype(jnp.float32)
        return h + g

    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    report = jaxmp.audit(jitted(fun, x, x, gpu="h200"))
    found = {(row.dtype, row.module, row.count) for row in report.lost_roundings}
    assert found == {("bfloat16", "gone", 1), ("float8_e4m3fn", "gone", 1)}
    assert "roundings that XLA took away" in str(report)
    assert all("test_compiled.py:" in row.where for row in report.lost_roundings)


@needs_compiler
def test_a_matmul_of_triton_is_read_too():
    def fun(x, w):
        return jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))

    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    with_triton = {"xla_gpu_enable_triton_gemm": True}
    report = jaxmp.audit(jitted(fun, x, x, gpu="h200", **with_triton))
    assert report.flops == {"bfloat16": 2.0 * 256**3} == report.asked
    (row,) = report.products
    assert row.targets == ("dot",)
    assert "test_compiled.py:" in row.where


@needs_compiler
def test_attention_is_told_to_be_a_kernel_or_written_out():
    def written(q):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, q)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), q)

    def experts(x, w):  # batched, with an exponential, and no softmax
        return jnp.einsum("ech,ehd->ecd", jax.nn.silu(jnp.einsum("ecd,edh->ech", x, w)),
                          w.transpose(0, 2, 1))  # fmt: skip

    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    report = jaxmp.audit(jitted(written, q, gpu="a100"))
    (row,) = report.attention
    assert row.bytes in (2 * 2 * 4 * 128 * 128, 4 * 2 * 4 * 128 * 128)
    fused = jaxmp.audit(
        jitted(lambda q: jaxmp.dot_product_attention(q, q, q), q, gpu="a100")
    )
    assert not fused.attention
    (kernel,) = fused.products
    assert kernel.operation == "attention"
    assert kernel.flops == 2 * 2.0 * 2 * 4 * 128 * 128 * 64
    x = jax.ShapeDtypeStruct((4, 64, 64), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((4, 64, 64), jnp.bfloat16)
    assert not jaxmp.audit(jitted(experts, x, w, gpu="a100")).attention


@needs_compiler
def test_large_arrays_in_float32_are_named_with_their_lines():
    def fun(x, w):
        with jax.named_scope("wide"):
            h = jnp.sin(x).astype(jnp.bfloat16) @ w
            return (h.astype(jnp.float32) @ w.astype(jnp.float32)) @ x

    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    w = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    report = jaxmp.audit(jitted(fun, x, w, gpu="a100"))
    assert report.wide_arrays
    for row in report.wide_arrays:
        assert (row.dtype, row.module, row.bytes) == ("float32", "wide", 4 * 512**2)
        assert row.share == row.bytes / report.temporary_bytes
