"""Writes int4.json: weights in pack-quantized int4, as compressed-tensors (Apache-2.0) writes and reads them.

    python -m venv /tmp/compressed
    /tmp/compressed/bin/pip install torch==2.13.0 compressed-tensors==0.20.0
    /tmp/compressed/bin/python tests/goldens/make_int4.py

Rows have 16 and 12 inputs, which do not fill their last int32, in groups of 4. The file holds the weights, scales,
the packed integers, the unpacked weights, and the quantization_config.
"""

import json
import pathlib

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)

GROUP, OUT = 4, 3


def case(compressor, scheme, inputs: int) -> dict:
    """Returns one weight [OUT inputs] with a largest integer of 7 in every group, as `round_w4` has it."""
    draw = torch.Generator().manual_seed(inputs)
    q = torch.randint(-6, 7, (OUT, inputs), generator=draw).float()
    q[:, ::GROUP] = 7 * torch.where(q[:, ::GROUP] < 0, -1.0, 1.0)
    scale = torch.randint(1, 1000, (OUT, inputs // GROUP), generator=draw) / 2**14
    noise = 0.4 * (2 * torch.rand(q.shape, generator=draw) - 1)
    noise[:, ::GROUP] = 0
    weight = (q + noise) * scale.repeat_interleave(GROUP, 1)
    stored = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    back = compressor.decompress(stored, scheme)["weight"]
    assert back.dtype == torch.float32 and stored["weight_shape"].dtype == torch.int64
    arrays = {name: x.tolist() for name, x in stored.items()}
    return arrays | {"weight": weight.tolist(), "back": back.tolist()}


def main():
    args = QuantizationArgs(num_bits=4, group_size=GROUP, symmetric=True, strategy="group")
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="pack-quantized",
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    golden = {
        "quantization_config": json.loads(config.model_dump_json()),
        "weights": [case(compressor, scheme, inputs) for inputs in (16, 12)],
    }
    text = json.dumps(golden, indent=1, sort_keys=True)
    pathlib.Path(__file__).with_name("int4.json").write_text(text + "\n")


main()
