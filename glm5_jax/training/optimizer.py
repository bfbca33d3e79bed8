"""Optimiser of a training run: Muon for matrices, AdamW for all other weights.

The first matching pattern of a table gives every weight a group:

    muon     attention, feed-forward, expert, router and eh_proj matrices, and the LM head
    adamw    embedding, score heads, norms, biases, taps and rates of Gated DeltaNet; the LM head if `lm_head` is
             "adamw"; muon's weights too, if `matrices` is "adamw"
    indexer  the lightning indexers, AdamW as well
    frozen   the router's balancing bias (a buffer), and the patterns of `OptimizerConfig.frozen`

With adapters (`model.lora`), these and a score head are in adamw, and all other weights are frozen.

- Each AdamW group is clipped by its global norm. The indexer's loss, which sends the trunk no gradient, thus
  does not affect the trunk through clipping either.
- Muon needs no clipping: its update does not depend on the gradient's length.
- Frozen weights have no optimiser state.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from glm5_jax.model import lora
from glm5_jax.parallel import tree
from glm5_jax.training.muon import scale_by_muon

GROUPS = (
    (r"router/bias$", "frozen"),
    (r"indexer/", "indexer"),
    (r"^lm_head/weight$", "lm_head"),
    (r"^(embed|score)/weight$", "adamw"),
    (r"norm$", "adamw"),
    (r"attn/\w+_bias$", "adamw"),
    (r"attn/(q_a|q_b|kv_a|k_b|v_b|q|k|v|o)$", "muon"),
    (r"gdn/(a|b|gate)$", "muon"),
    (r"gdn/(conv_\w|a_log|dt_bias)$", "adamw"),
    (r"(mlp|experts|shared)/(gate|up|down)$", "muon"),
    (r"router/weight$", "muon"),
    (r"^mtp/eh_proj$", "muon"),
)


@dataclasses.dataclass(kw_only=True)
class OptimizerConfig:
    """Constants of the optimiser. The learning rate, one for all groups, is a `ScheduleConfig`.

    Attributes:
      matrices: optimiser of the matrices, "muon" (GLM-4.5 2.4), or "adamw" for comparison.
      lm_head: optimiser of the head, "muon" or "adamw". GLM-4.5 2.4 uses Muon except for "word embedding, bias, and
        weights for RMSNorm". Public Muon, and the models that it names, use AdamW, which is better in our models of
        3M parameters (docs/results/ablations.md).
      muon_momentum: Muon's momentum (GLM-4.5 2.4).
      muon_nesterov: whether the momentum is Nesterov's. Not printed; as public Muon.
      muon_rms: RMS of Muon's update before the learning rate (GLM-4.5 2.4).
      split: blocks that Muon orthogonalises: "head" for Muon Split (GLM-5 2.1), "whole" for one per up-projection.
      ns_coefficients: coefficients of the Newton-Schulz iteration, those of public Muon.
      ns_steps: steps of the Newton-Schulz iteration (GLM-4.5 2.4).
      ns_dtype: dtype of the iteration. "bfloat16" as public Muon has half the exchange and the fast matrix units, for
        singular values that move by 1.5%. Use "float32" where runs on different meshes are compared.
      ns_blocks: "owned" for zero-redundant Muon (GLM-5 2.4): a device gathers the blocks that it owns and iterates only
        on them. "everywhere": on all blocks of which it has a part, for comparison.
      weight_decay: weight decay of matrices of every group, not of norms and biases (GLM-4.5 2.4).
      adam_b1: AdamW's decay of the first moment. AdamW is not printed; the values are usual for large language models.
      adam_b2: AdamW's decay of the second moment.
      adam_eps: AdamW's epsilon.
      clip_norm: maximum global norm of the gradient of each AdamW group. Not printed.
      frozen: patterns of weights that are not trained, such as ("indexer/",).
    """

    matrices: str = "muon"
    lm_head: str = "muon"
    muon_momentum: float = 0.95
    muon_nesterov: bool = True
    muon_rms: float = 0.2
    split: str = "head"
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    ns_steps: int = 5
    ns_dtype: str = "bfloat16"
    ns_blocks: str = "owned"
    weight_decay: float = 0.1
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: float = 1e-8
    clip_norm: float = 1.0
    frozen: tuple[str, ...] = ()


def groups_of(config: OptimizerConfig, letters: PyTree) -> PyTree:
    """Returns the tree of group names for a tree of axis letters.

    Raises ValueError if no pattern covers a weight, or if a frozen pattern matches nothing or is invalid.
    """
    paths = tree.flatten(letters)
    has_adapters = any(lora.is_adapter(path) for path in paths)
    for pattern in config.frozen:
        try:
            has_match = any(re.search(pattern, path) for path in paths)
        except re.error as error:
            raise ValueError(
                f"frozen pattern {pattern!r} is no regular expression: {error}"
            ) from None
        # Next to adapters every weight is frozen, whether or not a model has those that a stage names.
        if not has_match and not has_adapters:
            raise ValueError(f"frozen pattern {pattern!r} matches no weight; paths: {list(paths)}")
    if has_adapters:
        adapters = [(lora.ADAPTER, "adamw"), (r"^score/weight$", "adamw"), ("", "frozen")]
        return tree.first_match(
            [(pattern, "frozen") for pattern in config.frozen] + adapters, letters
        )
    named = {"lm_head": config.lm_head}
    table = [(pattern, named.get(group, group)) for pattern, group in GROUPS]
    table = [(pattern, config.matrices if group == "muon" else group) for pattern, group in table]
    return tree.first_match([(pattern, "frozen") for pattern in config.frozen] + table, letters)


def make_optimizer(
    config: OptimizerConfig, letters: PyTree, mesh: Mesh | AbstractMesh | None = None
) -> optax.GradientTransformation:
    """Builds the optimiser of a parameter tree with these axis letters, at a learning rate of 1.

    The caller multiplies the updates by the step's rate: a schedule in the optimiser would count only its
    updates, and lag after each skipped step. Parameters are expected in float32.

    mesh: parameters and gradients are sharded on it by `parallel.sharding.spec_of`; None: one device.
    """
    _check(config)
    groups = groups_of(config, letters)
    names = tree.flatten(letters)

    def decays(params):
        return tree.map_with_path(lambda path, _: len(set(names[path].split()) - {"l"}) > 1, params)

    # optax.contrib.muon would hand its own nesterov and eps to its Adam: NAdam with another eps.
    adamw = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            1.0,
            b1=config.adam_b1,
            b2=config.adam_b2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )
    muon = optax.chain(
        scale_by_muon(
            letters,
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            mesh=mesh,
            split=config.split,
            coefficients=config.ns_coefficients,
            steps=config.ns_steps,
            dtype=config.ns_dtype,
            rms=config.muon_rms,
            blocks=config.ns_blocks,
        ),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale(-1.0),
    )
    transforms = {"muon": muon, "adamw": adamw, "indexer": adamw, "frozen": optax.set_to_zero()}
    used = set(jax.tree.leaves(groups))
    return optax.partition({name: transforms[name] for name in transforms if name in used}, groups)


def _check(config: OptimizerConfig):
    for name in ("muon_momentum", "adam_b1", "adam_b2"):
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be in [0, 1)")
    for name in ("muon_rms", "adam_eps", "clip_norm", "ns_steps"):
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be positive")
    if config.weight_decay < 0:
        raise ValueError(f"weight_decay is {config.weight_decay}; it must not be negative")
    for name in ("matrices", "lm_head"):
        if getattr(config, name) not in ("muon", "adamw"):
            raise ValueError(f"{name} is {getattr(config, name)!r}; use 'muon' or 'adamw'")
    if len(config.ns_coefficients) != 3:
        raise ValueError(f"ns_coefficients is {config.ns_coefficients}; it must be three numbers")
    if config.ns_dtype not in ("bfloat16", "float32"):
        raise ValueError(f"ns_dtype is {config.ns_dtype!r}; use 'bfloat16' or 'float32'")
    if config.ns_blocks not in ("owned", "everywhere"):
        raise ValueError(f"ns_blocks is {config.ns_blocks!r}; use 'owned' or 'everywhere'")


def gradient_norms(gradients: PyTree, groups: PyTree) -> dict[str, Float[Array, ""]]:
    """Returns {group: norm of its gradients before clipping} in float32, for every group that is trained."""
    squares: dict[str, jax.Array] = {}
    for gradient, group in zip(jax.tree.leaves(gradients), jax.tree.leaves(groups), strict=True):
        if group != "frozen":
            square = jnp.sum(jnp.square(gradient.astype(jnp.float32)))
            squares[group] = squares.get(group, 0.0) + square
    return {group: jnp.sqrt(square) for group, square in sorted(squares.items())}


def state_shardings(state: PyTree, param_shardings: PyTree) -> PyTree:
    """Returns the shardings of an optimiser state, given as arrays or as `jax.eval_shape` of `init`.

    Momentum and moments are sharded like the parameter whose path is the end of theirs; counts are replicated.
    """
    shardings = tree.flatten(param_shardings)
    replicated = NamedSharding(next(iter(shardings.values())).mesh, P())

    def sharding(path, _):
        parts = path.split("/")
        suffixes = ("/".join(parts[i:]) for i in range(len(parts)))
        return next((shardings[s] for s in suffixes if s in shardings), replicated)

    return tree.map_with_path(sharding, state)
