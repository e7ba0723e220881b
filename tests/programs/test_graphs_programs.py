"""Networks on graphs and on points in space, with jraph, e3nn and neither."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from laws import KEY, Program, drawn, hold, normal, programs

SENDERS = jnp.array([0, 1, 2, 3, 4, 0, 2, 4, 5, 6, 7, 5])
RECEIVERS = jnp.array([1, 2, 3, 4, 0, 2, 4, 1, 6, 7, 5, 7])
GRAPH_OF_NODE = jnp.array([0, 0, 0, 0, 0, 1, 1, 1])


def message_passing():
    """Equivariant under rotations and shifts: positions move along differences."""
    nodes, positions = normal(1, 8, 6), normal(2, 8, 3)
    shapes = {"message": (13, 16), "move": (16, 1), "update": (22, 6), "out": (6, 1)}
    params = drawn({k: jnp.zeros(shape) for k, shape in shapes.items()})

    def loss(params, nodes, positions):
        for _ in range(2):
            apart = positions[SENDERS] - positions[RECEIVERS]
            far = jnp.sum(apart**2, -1, keepdims=True)
            inputs = [nodes[SENDERS], nodes[RECEIVERS], far]
            message = nn.silu(jnp.concatenate(inputs, -1) @ params["message"])
            step = apart * jnp.tanh(message @ params["move"]) / (jnp.sqrt(far) + 1)
            positions += jax.ops.segment_sum(step, RECEIVERS, 8) / 2
            arrived = jax.ops.segment_sum(message, RECEIVERS, 8)
            arrived = jnp.concatenate([nodes, arrived], -1)
            nodes += nn.silu(arrived @ params["update"])
        energies = jax.ops.segment_sum(nodes @ params["out"], GRAPH_OF_NODE, 2)
        return jnp.mean(energies**2) + jnp.mean(positions**2)

    return Program(loss, (params, nodes, positions), tolerance=8)


def forces():
    """The energy of a molecule is differentiated by its positions as well."""
    nodes, positions = normal(1, 8, 6), normal(2, 8, 3)
    aims = normal(3, 8, 3)
    shapes = {"basis": (8, 16), "nodes": (6, 16), "mix": (16, 16), "out": (16, 1)}
    params = drawn({k: jnp.zeros(shape) for k, shape in shapes.items()})

    def energy(positions, params, nodes):
        apart = positions[SENDERS] - positions[RECEIVERS]
        far = jnp.linalg.norm(apart, axis=-1, keepdims=True)
        basis = jnp.exp(-((far - jnp.linspace(0, 4, 8)) ** 2))
        filters = nn.softplus(basis @ params["basis"])
        messages = (nodes @ params["nodes"])[SENDERS] * filters
        arrived = jax.ops.segment_sum(messages, RECEIVERS, 8)
        return (nn.silu(arrived @ params["mix"]) @ params["out"]).sum()

    def loss(params, nodes, positions, aims):
        got = -jax.grad(energy)(positions, params, nodes)
        return jnp.mean((got - aims) ** 2)

    # Differentiated twice: JAX transposes products that sum over one term.
    return Program(loss, (params, nodes, positions, aims), tolerance=8, wide=True)


def jraph_network():
    """A graph network and a convolution, a padded batch, a loss over its graphs."""
    jraph = pytest.importorskip("jraph", reason="jraph is in the extra `programs`")
    graph = jraph.GraphsTuple(
        nodes=normal(1, 8, 6),
        edges=normal(2, 12, 4),
        senders=SENDERS,
        receivers=RECEIVERS,
        globals=normal(3, 2, 3),
        n_node=jnp.array([5, 3]),
        n_edge=jnp.array([8, 4]),
    )
    graph = jraph.pad_with_graphs(graph, 10, 16, 3)
    labels = jnp.array([0, 2, 0])

    class Net(nn.Module):
        @nn.compact
        def __call__(self, graph):
            def layer(name):
                dense = nn.Dense(8, name=name)
                return jraph.concatenated_args(lambda x: nn.relu(dense(x)))

            all_three = layer("edges"), layer("nodes"), layer("globals")
            graph = jraph.GraphNetwork(*all_three)(graph)
            graph = jraph.GraphConvolution(nn.Dense(8), add_self_edges=True)(graph)
            graph = jraph.GraphNetwork(None, layer("last"), layer("out"))(graph)
            return graph.globals

    model = Net()

    def loss(params, graph, labels):
        logits = nn.log_softmax(model.apply(params, graph))
        mask = jraph.get_graph_padding_mask(graph)
        return -jnp.sum(logits[jnp.arange(3), labels] * mask) / mask.sum()

    params = drawn(jax.eval_shape(model.init, KEY, graph))
    return Program(loss, (params, graph, labels))


def e3nn_network():
    """Tensor products of spherical harmonics, as potentials of molecules use them."""
    e3nn = pytest.importorskip("e3nn_jax", reason="e3nn-jax is in the extra `programs`")
    flax_e3nn = pytest.importorskip("e3nn_jax.flax")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, positions):
            apart = positions[SENDERS] - positions[RECEIVERS]
            apart = e3nn.IrrepsArray("1o", apart)
            harmonics = e3nn.spherical_harmonics("0e + 1o", apart, normalize=True)
            nodes = flax_e3nn.Linear("4x0e + 4x1o", name="embed")(
                e3nn.IrrepsArray("2x0e", jnp.ones((8, 2)))
            )
            message = e3nn.tensor_product(nodes[SENDERS], harmonics)
            message = flax_e3nn.Linear("8x0e + 4x1o", name="message")(message)
            far = e3nn.bessel(e3nn.norm(apart).array[:, 0], 4, 5.0)
            weights = nn.Dense(12, name="radial")(nn.silu(nn.Dense(8)(far)))
            message = message * weights
            arrived = e3nn.scatter_sum(message, dst=RECEIVERS, output_size=8)
            return flax_e3nn.Linear("0e", name="out")(arrived).array

    model, positions = Net(), normal(2, 8, 3)

    def loss(params, positions):
        return jnp.mean((model.apply(params, positions) - 1) ** 2)

    params = drawn(jax.eval_shape(model.init, KEY, positions))
    return Program(loss, (params, positions), wide=True)  # as for the forces


@programs(message_passing, forces, jraph_network, e3nn_network)
def test_graph_programs_are_what_they_were(program, policy, order):
    hold(program, policy, order)
