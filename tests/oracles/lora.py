"""Low-rank adapters in NumPy float64, from tensors under PEFT's names: W + (alpha / rank) B A.

It knows no JAX and nothing of `glm5_jax`. Linear weights are [out in], A [rank in] and B [out rank]. The experts of a
layer are one tensor [e out in], gate and up in one, with A [e * rank, in] (expert outside) and B [out, rank * e]
(expert inside); their names in the file are `experts.base_layer` for gate and up, and `experts` for down.
"""

import re

import numpy as np

PREFIX = "base_model.model."


def merge(weights, adapters, alpha, rank):
    """HF weights with the adapters added; weights have one tensor per expert."""
    merged, scale = dict(weights), alpha / rank
    adapters = {name.removeprefix(PREFIX): np.float64(x) for name, x in adapters.items()}
    for name, a in adapters.items():
        if not name.endswith("lora_A.weight"):
            continue
        module, b = name.removesuffix(".lora_A.weight"), adapters[name.replace("lora_A", "lora_B")]
        experts = re.fullmatch(r"(.*\.mlp\.experts)(\.base_layer)?", module)
        if experts is None:
            merged[f"{module}.weight"] = weights[f"{module}.weight"] + scale * b @ a
            continue
        names = ("gate_proj", "up_proj") if experts[2] else ("down_proj",)
        for expert in range(len(a) // rank):
            change = scale * b[:, expert :: len(a) // rank] @ a[expert * rank : (expert + 1) * rank]
            for part, projection in zip(np.split(change, len(names)), names):
                target = f"{experts[1]}.{expert}.{projection}.weight"
                merged[target] = weights[target] + part
    return merged
