"""Our arm of the comparison with transformers: a worker that `transformers_cpu.py` calls."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.choices import Apart, replayed
from experiments.benchmarks.measure import NEW_TOKENS, VOCAB_SIZE, Clock, gemm_rate, pin, tokens
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.config import ModelConfig
from glm5_jax.core.process import serve
from glm5_jax.model import glm5
from glm5_jax.model.cache import init_cache
from glm5_jax.model.generate import _advance as advance
from glm5_jax.model.plan import Plan
from glm5_jax.training.step import Rates, StepConfig, gradient_function

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


class Arm:
    """The functions that the parent calls; `run` measures once and keeps the output for `save`."""

    def __init__(self):
        params = glm5.init_params(BASELINE, jax.random.key(0))
        self.params = jax.jit(glm5.unstack, static_argnums=1)(params, BASELINE)
        self.run = self.output = None

    def export(self, folder: str) -> None:
        """The weights as transformers reads them."""
        save_hf(stacked(self.params), folder, cfg=BASELINE)

    def gemm(self) -> float:
        """FLOP/s of a large matmul."""
        a = jnp.ones((2048, 2048))
        matmul = jax.jit(jnp.matmul)
        return gemm_rate(lambda: matmul(a, a).block_until_ready())

    def prepare(self, kind: str, b: int, t: int) -> float:
        """Compiles forward, train or decode for tokens [b t]; the seconds it took, first run included."""
        clock = Clock()
        self.run = getattr(self, f"_{kind}")(b, t)
        self.measure()
        return clock.read()["wall"]

    def measure(self) -> dict[str, float]:
        """{"wall", "cpu"} seconds of one run."""
        seconds, self.output = self.run()
        return seconds

    def follow(self, kind: str, b: int, t: int, choices: str) -> dict[str, list[Apart]]:
        """One run, for `save`, of forward or train with the choices that transformers saved; per layer how
        many of the keys and experts would have been others, and by what gap."""
        made = np.load(choices)
        kinds = ("keys", "experts")
        keys, experts = ([made[k] for k in sorted(made) if k.startswith(kind)] for kind in kinds)
        with replayed(keys, experts) as apart:
            _, self.output = getattr(self, f"_{kind}")(b, t)()
            jax.effects_barrier()
        return apart

    def save(self, path: str) -> None:
        """The last run's output: logits or tokens as .npy, gradients as a HuggingFace folder."""
        if isinstance(self.output, dict):
            save_hf(stacked(self.output), path, cfg=BASELINE)
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
        """Mean next-token loss and the gradients of all parameters, without an optimiser."""
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

    def _decode(self, b, t):
        """NEW_TOKENS steps of the loop in `generate`; the prefill is not timed."""
        prompts = tokens(b, t)
        ones = np.ones((b, 1), np.int32)

        def run():
            cache = init_cache(BASELINE, b, t + NEW_TOKENS)
            logits, cache = advance(
                self.params, prompts, np.ones_like(prompts), cache, BASELINE, Plan()
            )
            out = [np.asarray(jnp.argmax(logits, axis=-1))]
            clock = Clock()
            for _ in range(NEW_TOKENS):
                logits, cache = advance(
                    self.params, out[-1][:, None], ones, cache, BASELINE, Plan()
                )
                out.append(np.asarray(jnp.argmax(logits, axis=-1)))
            return clock.read(), np.stack(out, axis=1)

        return run


def stacked(params):
    """The tree with its lists of layers as stacks, as checkpoints hold it."""
    return {
        k: jax.tree.map(lambda *a: jnp.stack(a), *v) if isinstance(v, list) else v
        for k, v in params.items()
    }


def main() -> None:
    """Answers the parent's calls."""
    pin()
    jax.config.update("jax_platforms", "cpu")
    arm = Arm()
    serve(arm.export, arm.gemm, arm.prepare, arm.measure, arm.follow, arm.save)


if __name__ == "__main__":
    main()
