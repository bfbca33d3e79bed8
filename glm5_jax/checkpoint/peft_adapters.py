"""Saves and loads adapters (`model.lora`) in the form of PEFT: adapter_config.json and adapter_model.safetensors.

    save_adapter(params, cfg, folder)      writes the adapters of a parameter tree
    load_adapter(folder, cfg)              returns a config with the adapters of a folder, and their arrays
    with_adapter(model, folder)            returns a model with the adapters of a folder merged into its weights

Names and layouts come from the table of checkpoint/hf_names.py. Routed experts have the form of PEFT's
`target_parameters`, because transformers stores all experts of a layer in one tensor. Dense and shared matrices are
listed there, too: PEFT 0.21 takes a `target_modules` entry gate_proj, up_proj or down_proj of these models for the
routed experts of older files.
"""

import dataclasses
import functools
import json
import logging
import math
import os
import pathlib
import reprlib
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jaxtyping import PyTree
from safetensors.numpy import save_file

from glm5_jax.checkpoint import hf_names
from glm5_jax.checkpoint.hf_export import tensors_of
from glm5_jax.config import LoraConfig, ModelConfig
from glm5_jax.model import glm5, lora, quant
from glm5_jax.parallel import multihost, tree
from glm5_jax.runtime.files import read_text

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Options of PEFT that change what an adapter computes, with the values that this model computes with.
_REQUIRED = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
    # Others change the base model's weights too, so that the adapter is not of the model that is given.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
# Options of PEFT that are read here, or say where an adapter is from and how it was trained.
_KNOWN = _REQUIRED.keys() | set(
    "r lora_alpha use_rslora target_modules target_parameters exclude_modules layers_pattern task_type inference_mode "
    "base_model_name_or_path revision auto_mapping peft_version lora_dropout megatron_config megatron_core "
    "ensure_weight_tying qalora_group_size eva_config loftq_config runtime_config".split()
)
_MAX_RANK = 1 << 20  # above the width of any model
_log = logging.getLogger(__name__)


def adapter_leaves(params: PyTree) -> dict[str, Any]:
    """Returns {path: leaf} of the adapters in a parameter tree."""
    return {path: x for path, x in tree.flatten(params).items() if lora.is_adapter(path)}


def save_adapter(
    params: PyTree, cfg: ModelConfig, out: str | os.PathLike, base: str | None = None
) -> None:
    """Writes the adapters of a parameter tree into a new folder. All processes of a pod must call it.

    base: name of the model without adapters, for the reader; None: no name.

    Raises ValueError, before it writes anything, if the folder is not empty or PEFT has no form for the targets.
    """
    if not cfg.lora.rank:
        raise ValueError("the model has no adapters (lora.rank is 0), so there are none to save")
    check_targets(cfg)
    out, pieces = pathlib.Path(out).absolute(), _pieces(cfg)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder; choose another or remove it")
    tensors = dict(tensors_of(adapter_leaves(params), pieces, np.float32))

    def write():
        partial = out.parent / f".{out.name}.{os.getpid()}.partial"
        partial.mkdir(parents=True)
        text = json.dumps(_to_peft(cfg, pieces, base), indent=1, sort_keys=True)
        (partial / CONFIG).write_text(text + "\n")
        named = {_PREFIX + name: tensor for name, tensor in tensors.items()}
        save_file(named, partial / WEIGHTS, metadata={"format": "pt"})
        # safetensors makes files readable to their owner only, whatever the umask.
        (partial / WEIGHTS).chmod((partial / CONFIG).stat().st_mode)
        os.rename(partial, out)

    multihost.run_on_first(write)


def load_adapter(
    folder: str | os.PathLike, cfg: ModelConfig
) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Returns cfg with the rank, alpha and targets of a folder's adapters, and {path: array} of the adapters.

    Raises ValueError if the folder holds no adapters, options of PEFT that this model does not compute, or tensors of
    another model.
    """
    folder = pathlib.Path(folder)
    rank, alpha = _read_config(folder / CONFIG)
    stored = _read_tensors(folder / WEIGHTS)
    everything = dataclasses.replace(
        lora.without_adapters(cfg), int4_group=None, lora=LoraConfig(rank=rank, targets=("",))
    )
    table = _pieces(everything)
    known = {piece.name for piece in table}
    if unknown := sorted(stored.keys() - known):
        raise ValueError(
            f"{folder / WEIGHTS} holds {len(unknown)} tensors that no adapter of this model has, among them "
            f"{_PREFIX}{unknown[0]}; use the adapters of this model, with one rank and all of its layers' names"
        )
    targets = sorted({p.path for p in table if p.name in stored and p.path.endswith(lora.B)})
    if not targets:
        raise ValueError(f"{folder / WEIGHTS} holds no adapter")
    patterns = tuple(f"^{path.removesuffix(lora.B)}$" for path in targets)
    adapted = dataclasses.replace(
        everything, lora=LoraConfig(rank=rank, alpha=alpha, targets=patterns)
    )
    leaves, pieces = {}, _pieces(adapted)
    if missing := sorted({piece.name for piece in pieces} - stored.keys()):
        raise ValueError(
            f"{folder / WEIGHTS} lacks {len(missing)} tensors, among them {_PREFIX}{missing[0]}; all layers of a kind "
            "must have an adapter"
        )
    shapes = tree.flatten(glm5.abstract_params(adapted))
    for path in {piece.path for piece in pieces}:
        leaves[path] = _read_leaf([p for p in pieces if p.path == path], shapes[path].shape, stored)
    return adapted, leaves


def with_adapter(model: glm5.Glm5, folder: str | os.PathLike) -> glm5.Glm5:
    """Returns the model with the adapters of a folder merged into its weights.

    Raises ValueError in the cases of `load_adapter`, or if a target is quantised.
    """
    cfg, leaves = load_adapter(folder, model.cfg)
    params = tree.flatten(glm5.params_of(model))
    int4 = quant.ROUTED if model.cfg.int4_group else ()
    quantised = sorted(
        path
        for path, x in params.items()
        if path + lora.B in leaves and (tree.is_compound(x) or tree.matches_any(int4, path))
    )
    if quantised:
        raise ValueError(
            f"{folder} has an adapter of {quantised[0]}, which is quantised here; merge it into the model that was "
            "quantised, and quantise the result"
        )
    if model.mesh is None:
        places = dict.fromkeys(leaves)
    else:
        places = tree.flatten(glm5.param_shardings(cfg, model.mesh))
    placed = {path: jax.device_put(x, places[path]) for path, x in leaves.items()}
    merged = lora.merge_adapters(tree.unflatten(params | placed), cfg)
    dtype = params["final_norm"].dtype
    return glm5.Glm5(model.cfg, params=merged, param_dtype=dtype, mesh=model.mesh)


@functools.lru_cache(maxsize=8)
def _pieces(cfg: ModelConfig) -> list[hf_names.Piece]:
    """Returns the pieces of all adapters of a model."""
    letters, shapes = (
        tree.unflatten(adapter_leaves(leaves))
        for leaves in (glm5.axis_letters(cfg), glm5.abstract_params(cfg))
    )
    return hf_names.pieces(cfg, letters, shapes)


def check_targets(cfg: ModelConfig) -> None:
    """Raises ValueError if PEFT has no form for the targets of a model's adapters."""
    paths = {piece.path for piece in _pieces(cfg)}
    for group in (("attn/k_b", "attn/v_b"), ("experts/gate", "experts/up", "experts/down")):
        for stack, _ in glm5.stacks(cfg):
            targets = [path for path in group if f"{stack}/{path}{lora.B}" in paths]
            if targets and len(targets) < len(group):
                raise ValueError(
                    f"lora.targets has {', '.join(targets)} of {', '.join(group)} in {stack}; PEFT's form has all "
                    "of them or none"
                )


def _to_peft(cfg: ModelConfig, pieces: list[hf_names.Piece], base: str | None) -> dict:
    """Returns the content of adapter_config.json."""
    modules, parameters = set(), set()
    for piece in pieces:
        module = piece.name.partition(".lora_")[0]
        if "experts/" in piece.path:
            parameters |= {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
        elif "/attn/" in piece.path or "/indexer/" in piece.path:
            modules.add(module.rpartition(".")[2])
        else:
            parameters.add(".".join(module.split(".")[-2:]) + ".weight")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": cfg.lora.rank,
        "lora_alpha": cfg.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None,
    }


def _read_config(file: pathlib.Path) -> tuple[int, float]:
    """Returns (rank, alpha) of an adapter_config.json. Raises ValueError for options that are not supported."""
    try:
        content = json.loads(read_text(file))
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read ({error.strerror}); give the folder of a PEFT adapter"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no object; save the adapter again")
    for name, values in _REQUIRED.items():
        if (value := content.get(name)) not in values:
            raise ValueError(
                f"{file}: {name} is {value!r}, and this model computes with {values[0]!r} only; train the adapter so"
            )
    others = {name: content[name] for name in content if name not in _KNOWN and content[name]}
    for name, value in others.items():
        _log.warning(
            "%s: %s is %s, an option that is not known here and is ignored",
            file,
            name,
            reprlib.repr(value),
        )
    rank, alpha = content.get("r"), content.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= _MAX_RANK:
        shown = reprlib.repr(rank)
        raise ValueError(f"{file}: r is {shown}; it must be an integer from 1 to {_MAX_RANK}")
    if not isinstance(alpha, int | float) or alpha is True or not 0 < alpha <= sys.float_info.max:
        shown = reprlib.repr(alpha)
        raise ValueError(f"{file}: lora_alpha is {shown}; it must be a positive number")
    is_stabilised = content.get("use_rslora")
    if not isinstance(is_stabilised, bool | None):
        raise ValueError(f"{file}: use_rslora is {is_stabilised!r}; it must be true or false")
    # Rank-stabilised adapters have the scale alpha / sqrt(r).
    return rank, float(alpha) * (math.sqrt(rank) if is_stabilised else 1.0)


def _read_tensors(file: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file by their names without PEFT's prefix."""
    try:
        with safetensors.safe_open(file, "flax") as opened:
            names = {name: name.removeprefix(_PREFIX) for name in opened.keys()}
            if twice := sorted(name for name, short in names.items() if name != short in names):
                raise ValueError(
                    f"{file} holds {twice[0]} twice, with and without {_PREFIX}; save the adapter again"
                )
            return {short: np.asarray(opened.get_tensor(name)) for name, short in names.items()}
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _read_leaf(
    pieces: list[hf_names.Piece], shape: tuple[int, ...], stored: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Returns an adapter's array in float32. Raises ValueError for a tensor of another shape, or of integers."""
    for piece in pieces:
        if (held := stored[piece.name].shape) != piece.view.shape:
            raise ValueError(
                f"{_PREFIX}{piece.name} has shape {list(held)}, expected {list(piece.view.shape)}; the adapter is of "
                "another model"
            )
        if not jnp.issubdtype(stored[piece.name].dtype, jnp.floating):
            raise ValueError(
                f"{_PREFIX}{piece.name} is {stored[piece.name].dtype.name}, which is no number of an adapter; save the "
                "adapter in float32, float16 or bfloat16"
            )
        if not np.isfinite(stored[piece.name].astype(np.float32)).all():
            raise ValueError(
                f"{_PREFIX}{piece.name} holds NaN or infinity; use an earlier checkpoint of the adapter"
            )
    ranges = [slice(0, size) for size in shape]
    return hf_names.fill(
        pieces, ranges, np.float32, lambda piece, part: piece.view.of(stored[piece.name], part)
    )
