"""What is known of an array is known of it alone, and keeps nothing alive."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp

from jaxmp._base.marks import Marked


def test_an_array_is_marked_and_no_equal_one_is():
    marked, x = Marked(), jnp.ones(2)
    marked.add([x, "a name", None, 1.0])
    assert x in marked
    others = (jnp.ones(2), x + 0, "a name", None, 1.0)
    assert not any(other in marked for other in others)


def test_a_mark_keeps_no_array_and_no_tracer_alive():
    marked, seen = Marked(), []

    @jax.jit
    def traced(x):
        marked.add([x])
        assert x in marked
        seen.append(weakref.ref(x))
        return x

    x = jnp.ones(2)
    traced(x)
    marked.add([x])
    seen.append(weakref.ref(x))
    del x
    jax.clear_caches()
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
    # Those that come after it have its id, or not, and no mark.
    assert not any(jnp.ones(2) in marked for _ in range(99))


def test_threads_mark_arrays_of_their_own_at_once():
    marked, wrong, start = Marked(), [], threading.Barrier(4)
    one = jnp.ones(2)

    def run():
        start.wait()
        for _ in range(500):
            x = jax.device_put(one, jax.devices()[0], may_alias=False)
            if x in marked:
                wrong.append(x)
            marked.add([x])
            if x not in marked:
                wrong.append(x)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
