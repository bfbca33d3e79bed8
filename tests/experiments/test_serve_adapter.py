"""A server with an adapter has the merged weights."""

import jax
import numpy as np

from experiments import serve
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.checkpoint.peft_adapters import save_adapter, with_adapter
from glm5_jax.config import LoraConfig
from glm5_jax.inference.server import ServerConfig
from glm5_jax.model import glm5, lora
from glm5_jax.parallel.tree import flatten, map_with_path
from glm5_jax.text.tokenizer import Tokenizer
from tests.model.small import one_layer

BYTES = Tokenizer.load("bytes")


def test_serves_merged_weights(tmp_path):
    cfg = one_layer(vocab_size=292, model_type="glm4_moe_lite", lora=LoraConfig(rank=2))
    noise = np.random.default_rng(0)
    params = map_with_path(
        lambda path, x: noise.standard_normal(x.shape) if lora.is_adapter(path) else x,
        glm5.init_params(cfg, jax.random.key(0)),
    )
    plain = lora.without_adapters(cfg)
    base = {p: x for p, x in flatten(params).items() if not lora.is_adapter(p)}
    model = glm5.Glm5(plain, params=params, param_dtype="float32")
    save_hf(model, tmp_path / "base", tokenizer=BYTES)
    save_adapter(params, cfg, tmp_path / "adapter")
    config = serve.ServeConfig(
        checkpoint=str(tmp_path / "base"),
        adapter=str(tmp_path / "adapter"),
        engine=serve.EngineConfig(page_size=16, max_num_seqs=2, prefill_chunk=32, max_length=64),
        server=ServerConfig(port=0, model="tiny"),
        warm=False,
    )
    served = flatten(serve.make_server(config).worker.engine.computation.params)
    merged = flatten(glm5.unstack(glm5.params_of(with_adapter(model, tmp_path / "adapter")), plain))
    assert served.keys() == merged.keys()
    for path, x in merged.items():
        np.testing.assert_array_equal(served[path], x, err_msg=path)
    changed = "dense_layers/0/attn/o"
    assert not np.array_equal(served[changed], base["dense_layers/attn/o"][0])
