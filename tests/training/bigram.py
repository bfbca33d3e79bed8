"""Language model of one matrix and its data, for tests of the training loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB = 31


def initialise(seed: int = 0) -> dict:
    params = {"table": 0.1 * jax.random.normal(jax.random.key(seed), (VOCAB, VOCAB))}
    return {
        "params": params,
        "optimizer": optax.adam(0.1).init(params),
        "step": jnp.zeros((), jnp.int32),
        "rng": jax.random.key_data(jax.random.key(seed + 1)),
    }


def loss_of(params, batch):
    logits = params["table"][batch["token_ids"][:, :-1]]
    targets = batch["token_ids"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean() * batch["scale"]


def step(state, batch):
    """Runs Adam with dropout drawn from the state's key and step; skips updates that are not finite."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state["rng"]), state["step"])
    keep = jax.random.bernoulli(key, 0.9, (VOCAB, VOCAB))

    def dropped(params):
        return loss_of({"table": params["table"] * keep}, batch)

    loss, grads = jax.value_and_grad(dropped)(state["params"])
    updates, moments = optax.adam(0.1).update(grads, state["optimizer"], state["params"])
    good = jnp.isfinite(loss)
    new = (optax.apply_updates(state["params"], updates), moments)
    params, moments = jax.tree.map(
        lambda a, b: jnp.where(good, a, b), new, (state["params"], state["optimizer"])
    )
    out = {**state, "params": params, "optimizer": moments, "step": state["step"] + 1}
    metrics = {
        "loss": {"total": loss},
        "grad_norm": {"adamw": optax.tree.norm(grads)},
        "router": {"load_imbalance": jnp.ones(3)},
        "skipped": ~good,
    }
    return out, metrics


class Loader:
    """Loader whose batch i depends on seed and i; bad: numbers of batches with an infinite loss."""

    def __init__(self, seed: int = 0, bad=()):
        self.seed, self.position, self.bad = seed, 0, set(bad)

    def next(self, batch_size: int) -> dict:
        rng = np.random.default_rng([self.seed, self.position])
        start = rng.integers(0, VOCAB, (batch_size, 1))
        ids = (start + np.arange(9) * 3 + rng.integers(0, 2, (batch_size, 9))) % VOCAB
        scale = np.float32(np.inf if self.position in self.bad else 1)
        self.position += 1
        return {"token_ids": ids.astype(np.int32), "scale": scale}

    def state(self) -> dict:
        return {"position": self.position}

    def restore(self, state: dict) -> None:
        self.position = state["position"]
