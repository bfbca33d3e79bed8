"""Tests that Muon on 8 devices, which exchange blocks, computes the update of one device."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from glm5_jax import presets
from glm5_jax.model import glm5
from glm5_jax.parallel import tree
from glm5_jax.parallel.mesh import AXES, make_mesh
from glm5_jax.training import muon
from glm5_jax.training.optimizer import OptimizerConfig, make_optimizer, state_shardings
from tests.mesh import cases

LEAVES = (  # one of every layout: batch, rows and columns sharded, in all combinations
    r"moe_layers/attn/(q_a|q_b|k_b|o)$|dense_layers/attn/o|dense_layers/mlp/down"
    r"|moe_layers/experts/(gate|down)|router/weight|eh_proj"
)
MESHES = [
    {"fsdp": 2, "expert": 4},
    {"expert": 2, "context": 2, "tensor": 2},
    *(
        pytest.param(axes, marks=pytest.mark.slow)
        for axes in ({"fsdp": 8}, {"data": 2, "fsdp": 2, "expert": 2}, {"data": 8})
    ),
]


def select(values, pattern=LEAVES):
    return tree.unflatten({p: v for p, v in tree.flatten(values).items() if re.search(pattern, p)})


LETTERS = select(glm5.axis_letters(presets.tiny()))
SHAPES = select(glm5.abstract_params(presets.tiny()))


def random_tree(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.standard_normal(s.shape).astype(np.float32), shapes)


def orthogonalize(mesh=None, mode="owned", letters=LETTERS):
    """Returns the function of updates.

    mode: "owned" or "everywhere", as `blocks` of `muon.orthogonalize`; "divided": no block is small enough for one owner.
    """
    options = {"max_owned_elements": 0} if mode == "divided" else {"blocks": mode}
    tx = muon.orthogonalize(letters, mesh=mesh, dtype="float32", **options)
    return lambda updates: tx.update(updates, optax.EmptyState())[0]


@functools.cache
def one_device_update():
    return jax.jit(orthogonalize())(random_tree(SHAPES))


@functools.cache
def on_mesh(axes, mode="owned"):
    """Returns (compiled, update, {(r, c): number of blocks that one device iterates on})."""
    mesh, blocks = make_mesh(dict(axes)), collections.Counter()
    name = {"owned": "apply_to_owned_blocks", "everywhere": "apply_to_gathered_blocks"}[mode]
    exchange = getattr(muon, name)

    def counting(function, *args):
        def count(x):
            blocks[tuple(sorted(x.shape[1:]))] += len(x)
            return function(x)

        return exchange(count, *args)

    shardings = cases.shardings_of(LETTERS, SHAPES, mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, name, counting)
        function = orthogonalize(mesh, mode)
        jitted = jax.jit(function, in_shardings=(shardings,), out_shardings=shardings)
        compiled = jitted.lower(SHAPES).compile()
    return compiled, compiled(jax.device_put(random_tree(SHAPES), shardings)), blocks


def as_key(axes):
    return tuple(axes.items())


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_muon_on_mesh_equals_one_device(axes):
    got = tree.flatten(on_mesh(as_key(axes))[1])
    for path, want in tree.flatten(one_device_update()).items():
        np.testing.assert_allclose(got[path], want, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_divided_blocks_equal_one_device(axes):
    mesh = make_mesh(axes)
    shardings = cases.shardings_of(LETTERS, SHAPES, mesh)
    update = jax.jit(orthogonalize(mesh, "divided"), out_shardings=shardings)
    got = tree.flatten(update(jax.device_put(random_tree(SHAPES), shardings)))
    for path, want in tree.flatten(one_device_update()).items():
        np.testing.assert_allclose(got[path], want, atol=1e-5, err_msg=path)


def test_divided_head_exchanges_only_its_shorter_side():
    """The head [128, 2048] is divided 2 x 4; only the products [128, 128] and the norm are summed."""
    mesh, cfg = make_mesh(fsdp=2, expert=4), presets.tiny()
    letters = select(glm5.axis_letters(cfg), "^lm_head/")
    shapes = select(glm5.abstract_params(cfg), "^lm_head/")
    shardings = cases.shardings_of(letters, shapes, mesh)
    jitted = jax.jit(orthogonalize(mesh, "divided", letters), out_shardings=shardings)
    text = jitted.lower(jax.device_put(random_tree(shapes), shardings)).compile().as_text()
    sums = re.findall(r"= (\S+?)(?:\{\S*)? all-reduce(?:-start)?\(", text)
    gathers = re.findall(r"= (\S+?)(?:\{\S*)? all-gather(?:-start)?\(", text)
    vocabulary = cfg.vocab_size
    assert set(sums) == {"f32[1,1,1]", "f32[1,128,128]"} and "all-to-all" not in text
    assert gathers and all(str(vocabulary) not in gathered for gathered in gathers)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_exchanges_blocks_without_sums(axes):
    text = on_mesh(as_key(axes))[0].as_text()
    counts = {
        op: len(re.findall(rf" {op}(?:-start)?\(", text)) for op in ("all-to-all", "all-gather")
    }
    assert "all-reduce" not in text and "reduce-scatter" not in text
    assert (counts["all-to-all"] > 0) == (axes != {"data": 8})
    if axes == {"fsdp": 2, "expert": 4}:  # no device holds a copy, so nothing is gathered
        assert counts["all-gather"] == 0


def num_blocks():
    """Returns {(r, c): number of such blocks in all weights}."""
    total = collections.Counter()
    for path, letters in tree.flatten(LETTERS).items():
        shape = tree.flatten(SHAPES)[path].shape
        block = muon.layout_of(path, letters).size(shape)
        total[tuple(sorted(block))] += math.prod(shape) // math.prod(block)
    return total


def by_smaller_side(blocks):
    """Returns {r: number of blocks [r, c] or [c, r]}, since blocks of one r may be computed together."""
    total = collections.Counter()
    for (rows, _), num in blocks.items():
        total[rows] += num
    return total


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_computes_each_block_once(axes):
    total, one_device = by_smaller_side(num_blocks()), by_smaller_side(on_mesh(as_key(axes))[2])
    assert one_device.keys() == total.keys()
    for rows, num in total.items():
        incomplete = 3  # partly filled shares, one for each sharding of such weights
        assert num <= 8 * one_device[rows] < num + 8 * incomplete, rows


def test_spreads_few_blocks_over_devices():
    """There are four matrices `o` [192, 128], one `down` [384, 128] and one `eh_proj` [256, 128]."""
    few = {block: num for block, num in num_blocks().items() if block[0] == 128}
    assert few == {(128, 192): 4, (128, 384): 1, (128, 256): 1}
    blocks = on_mesh(as_key({"fsdp": 2, "expert": 4}))[2]
    assert {block: num for block, num in blocks.items() if block[0] == 128} == {(128, 384): 1}


@pytest.mark.parametrize(
    "axes",
    [
        {"expert": 2, "context": 2, "tensor": 2},
        pytest.param({"fsdp": 8}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_owned_blocks_save_work_of_gathered_blocks(axes):
    """With gathered blocks all devices with a part of a block compute it, with owned blocks only one."""
    _, update, everywhere = on_mesh(as_key(axes), "everywhere")
    got, owned = tree.flatten(update), on_mesh(as_key(axes))[2]
    for path, want in tree.flatten(one_device_update()).items():
        np.testing.assert_allclose(got[path], want, atol=1e-5, err_msg=path)
    if axes == {"fsdp": 8}:  # shards every matrix, so each is computed eight times
        assert everywhere == num_blocks()
    everywhere, owned = by_smaller_side(everywhere), by_smaller_side(owned)
    assert all(everywhere[rows] > owned[rows] for rows in owned)


def test_full_optimizer_on_mesh_equals_one_device():
    cfg, pattern = (
        presets.tiny(),
        r"moe_layers/(attn/q_b|attn_norm|experts/up|router|indexer)|embed",
    )
    letters, shapes = (
        select(glm5.axis_letters(cfg), pattern),
        select(glm5.abstract_params(cfg), pattern),
    )
    config, mesh = OptimizerConfig(ns_dtype="float32"), make_mesh(fsdp=2, expert=4)
    placed = cases.shardings_of(letters, shapes, mesh)

    def run(mesh, place):
        tx = make_optimizer(config, letters, mesh)
        moments = None
        if mesh is not None:
            moments = state_shardings(jax.eval_shape(tx.init, shapes), placed)

        def step(params, state, gradients):
            updates, state = tx.update(gradients, state, params)
            return jax.tree.map(lambda p, u: p + 0.1 * u, params, updates), state

        out = None if mesh is None else (placed, moments)
        step, params = jax.jit(step, out_shardings=out), place(random_tree(shapes))
        state = jax.jit(tx.init, out_shardings=moments)(params)
        for seed in (1, 2):
            params, state = step(params, state, place(random_tree(shapes, seed)))
        assert step._cache_size() == 1
        text = step.lower(params, state, params).compile().as_text()
        sums = re.findall(r"= (\S+|\(.*?\)) all-reduce(?:-start)?\(", text)
        assert not re.search(r"\[\d", "".join(sums))  # sums of scalars only, the norms for clipping
        assert mesh is None or sums
        return tree.flatten(params), tree.flatten(state)

    want, _ = run(None, lambda x: jax.tree.map(jnp.asarray, x))
    got, state = run(mesh, lambda x: jax.device_put(x, placed))
    for path in want:
        np.testing.assert_allclose(got[path], want[path], atol=1e-5, err_msg=path)

    scalars = [x for x in state.values() if x.ndim == 0]
    assert len(scalars) == 2 and all(x.sharding.is_fully_replicated for x in scalars)
    for path, sharding in tree.flatten(placed).items():
        moments_of_weight = [x for p, x in state.items() if p.endswith("/" + path)]
        muon_or_frozen = re.search(r"attn/q_b|experts/up|router/weight", path)
        number = 0 if path.endswith("router/bias") else 1 if muon_or_frozen else 2
        assert len(moments_of_weight) == number, path
        for x in moments_of_weight:
            assert x.sharding == sharding and x.shape == tree.flatten(shapes)[path].shape


def test_largest_weights_lower_on_1024_devices():
    cfg = presets.glm5()
    letters = select(glm5.axis_letters(cfg), r"moe_layers/(attn/o|experts/gate)$")
    shapes = select(glm5.abstract_params(cfg), r"moe_layers/(attn/o|experts/gate)$")
    mesh = jax.sharding.AbstractMesh((1, 16, 64, 1, 1), AXES, (AxisType.Auto,) * 5)
    tx = muon.orthogonalize(letters, mesh=mesh)
    args = jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes,
        cases.shardings_of(letters, shapes, mesh),
    )
    traced = jax.jit(lambda updates: tx.update(updates, optax.EmptyState())[0]).trace(args)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    exchanged = re.findall(r"all_to_all.*: \(tensor<(\w+)>\)", text)
    assert len(exchanged) == 4  # each weight to its owners and back
    # 75 x 4 experts over the 16 devices that share them; 75 matrices `o` over all 1,024.
    assert {x for x in exchanged} == {"304x384x2048xbf16", "1024x1x256x384xbf16"}
