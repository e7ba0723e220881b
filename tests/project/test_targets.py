"""Code is compiled for the GPU that is named."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.counting import hlo, targets

UNAVAILABLE = targets.unavailable()
pytestmark = pytest.mark.skipif(bool(UNAVAILABLE), reason=str(UNAVAILABLE))

# The assembler of CUDA 13 has dropped the V100.
NAMES = [name for name in targets.GPUS if name != "v100"]


@pytest.mark.parametrize("gpu", targets.GPUS)
def test_a_device_says_which_gpu_it_is(gpu):
    (device,) = targets.devices(gpu)
    major, minor = targets.GPUS[gpu].capability
    assert device.compute_capability == f"{major}.{minor}"
    assert device.core_count == targets.GPUS[gpu].cores
    assert device.device_kind.startswith(targets.GPUS[gpu].name)
    assert device.platform == "gpu"


@pytest.mark.parametrize("gpu", NAMES)
def test_products_in_bfloat16_need_a_gpu_that_has_them(gpu):
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    text = targets.compiled(jnp.matmul, x, x, gpu=gpu).as_text()
    (kind,) = hlo.work(text).products
    has_them = targets.GPUS[gpu].capability >= (8, 0)
    assert kind.startswith("matmul bf16" if has_them else "matmul f32")
