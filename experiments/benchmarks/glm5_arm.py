"""Runs our arm of the comparison with transformers: a worker process of `transformers_cpu.py`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from experiments.benchmarks.measure import NEW_TOKENS, VOCAB_SIZE, Clock, gemm_rate, pin, tokens
from experiments.benchmarks.teacher_forced_choices import ChoiceGap, forced_choices
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.config import ModelConfig
from glm5_jax.inference.engine import KEEP, Engine
from glm5_jax.inference.request import EngineConfig, Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.model import glm5
from glm5_jax.runtime.process import serve
from glm5_jax.training.gradients import Rates, gradient_function
from glm5_jax.training.step_config import StepConfig

# GLM-5's proportions in 19.4M parameters, 8.4M of them active: latents of a half and a third of the
# width, one dense layer, 4 of 16 experts and a shared one, an indexer that keeps 256 keys. It has 16
# heads of 16 where GLM-5's ratios give 4 of 32: with 4, random weights score every sixteenth key exactly
# zero, torch.topk breaks ties in no particular order, and one other key changes all later positions.
BASELINE = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=384,
    num_hidden_layers=4,
    first_k_dense_replace=1,
    num_attention_heads=8,
    q_lora_rank=192,
    kv_lora_rank=128,
    qk_nope_head_dim=48,
    qk_rope_head_dim=16,
    v_head_dim=64,
    intermediate_size=1024,
    moe_intermediate_size=256,
    n_routed_experts=16,
    num_experts_per_tok=4,
    index_n_heads=16,
    index_head_dim=16,
    index_topk=256,
    num_nextn_predict_layers=0,
    initializer_range=0.02,
    max_position_embeddings=65536,
    eos_token_id=(1,),
    pad_token_id=None,
    dtype="float32",
)


class Glm5Arm:
    """Functions that the parent calls; `run` measures once and keeps the output for `save`."""

    def __init__(self):
        self.model = glm5.Glm5(BASELINE, rngs=nnx.Rngs(0))
        self.params = jax.jit(glm5.unstack, static_argnums=1)(self._stacked(), BASELINE)
        self.run: Callable[[], tuple[dict[str, float], Any]] | None = None
        self.output: Any = None

    def export(self, folder: str) -> None:
        """Writes the weights in HuggingFace's format."""
        save_hf(self.model, folder)

    def gemm(self) -> float:
        """Returns the FLOP/s of a large matmul."""
        a = jnp.ones((2048, 2048))
        matmul = jax.jit(jnp.matmul)
        return gemm_rate(lambda: matmul(a, a).block_until_ready())

    def prepare(self, kind: str, b: int, t: int) -> float:
        """Compiles forward, train, prefill or decode for tokens [b t]. Returns the seconds, with a first run."""
        clock = Clock()
        self.run = getattr(self, f"_{kind}")(b, t)
        self.measure()
        return clock.read()["wall"]

    def measure(self) -> dict[str, float]:
        """Returns {"wall", "cpu"} seconds of one run."""
        if self.run is None:
            raise ValueError("nothing is compiled to be measured; call prepare first")
        seconds, self.output = self.run()
        return seconds

    def follow(self, kind: str, b: int, t: int, choices: str) -> dict[str, list[ChoiceGap | None]]:
        """Runs forward or train once, for `save`, with the choices that transformers saved.

        Returns per layer how many keys and experts would have been others, and by what gap.
        """
        saved_choices = np.load(choices)
        kinds = ("keys", "experts")
        keys, experts = (
            [saved_choices[k] for k in sorted(saved_choices) if k.startswith(kind)]
            for kind in kinds
        )
        with forced_choices(keys, experts) as gaps:
            _, self.output = getattr(self, f"_{kind}")(b, t)()
            jax.effects_barrier()
        return gaps

    def save(self, path: str) -> None:
        """Writes the last run's output: logits or tokens as .npy, gradients as a HuggingFace folder."""
        if isinstance(self.output, dict):
            save_hf(stack_layers(self.output), path, cfg=BASELINE)
        else:
            np.save(path, np.asarray(self.output))

    def _forward(self, b, t):
        x = jnp.asarray(tokens(b, t))
        forward = jax.jit(lambda params, x: glm5.forward(params, x, BASELINE).logits)

        def run():
            clock = Clock()
            logits = forward(self.params, x).block_until_ready()
            return clock.read(), logits

        return run

    def _train(self, b, t):
        """Returns a run of the mean next-token loss and the gradients of all parameters, without an optimiser."""
        x = jnp.asarray(tokens(b, t))
        config = StepConfig(mtp_steps=0, balance_weight=0.0, remat="none")
        batch = {
            "token_ids": x,
            "segment_ids": jnp.ones_like(x),
            "positions": jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), x.shape),
            "loss_mask": jnp.ones(x.shape).at[:, 0].set(0),
            "ce_weight": jnp.ones(x.shape),
        }
        rates = Rates(jnp.zeros(()), jnp.zeros(()))
        gradients = jax.jit(gradient_function(BASELINE, config))

        def run():
            clock = Clock()
            _, _, grads = jax.block_until_ready(gradients(self.params, batch, rates))
            return clock.read(), grads

        return run

    def _prefill(self, b, t):
        """Returns a run that samples the first token of all rows through the engine's API."""
        engine = self._engine(b, t)

        def run():
            # Clears the prompts of the previous run from the cache.
            engine.update_weights(self._stacked(), engine.version + 1, KEEP)
            clock = Clock()
            replies = engine.generate(tokens(b, t).tolist(), _greedy(1))
            return clock.read(), np.array([reply.ids for reply in replies])

        return run

    def _decode(self, b, t):
        """Returns a run that samples NEW_TOKENS tokens of all rows after the first one, through the engine's API."""
        engine = self._engine(b, t)

        def run():
            requests = [Request(ids, _greedy(NEW_TOKENS + 1)) for ids in tokens(b, t).tolist()]
            handles = [engine.submit(request) for request in requests]
            while not all(handle.tokens for handle in handles):
                engine.step()
            clock = Clock()
            while engine.step():
                pass
            seconds = clock.read()
            return seconds, np.array([handle.completion.ids for handle in handles])

        return run

    def _engine(self, b, t):
        """Returns an engine that prefills all rows in one step."""
        sizes = {"prefill_chunk": t, "max_batched_tokens": b * t, "max_length": t + NEW_TOKENS + 1}
        return Engine(self.model, config=EngineConfig(max_num_seqs=b, **sizes))

    def _stacked(self):
        return glm5.params_of(self.model)


def _greedy(count: int) -> Sampling:
    return Sampling(max_tokens=count, temperature=0, ignore_eos=True)


def stack_layers(params: PyTree) -> PyTree:
    """Returns the tree with its lists of layers as stacks, the form of checkpoints."""
    return {
        k: jax.tree.map(lambda *a: jnp.stack(a), *v) if isinstance(v, list) else v
        for k, v in params.items()
    }


def main() -> None:
    """Serves the parent's calls."""
    pin()
    jax.config.update("jax_platforms", "cpu")
    arm = Glm5Arm()
    serve(arm.export, arm.gemm, arm.prepare, arm.measure, arm.follow, arm.save)


if __name__ == "__main__":
    main()
