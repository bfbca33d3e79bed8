"""Runs a few training steps on eight CPU devices and prints a report of the compiled program as JSON.

It needs a separate process. XLA writes its warnings to standard error from C++, if the log level allows it before jax
is imported and if the program is not cached.
"""

import json
import os
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax.parallel.mesh import BATCH_AXES, SEQUENCE_AXES, make_mesh
from glm5_jax.parallel.tree import flatten
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.step import make_step
from launch.aot.hlo import find_collectives, groups_along
from tests.mesh import cases

STEPS = 3
END_OF_REFERENCE = "=== the step's own compilation ==="


def compile_replicating_program() -> None:
    """Compiles a change of layout that XLA can only do by replicating the array on every device."""
    mesh = make_mesh(fsdp=2, expert=4)

    def pin(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def program(x):
        return pin(jnp.sin(pin(x, ("fsdp", "expert"))), None, "expert")

    jax.jit(program).lower(jnp.ones((8, 8))).compile()


def _axes(spec) -> list[str]:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry]
    return [axis for entry in entries for axis in entry]


def main() -> None:
    compile_replicating_program()
    sys.stderr.flush()
    os.write(2, f"{END_OF_REFERENCE}\n".encode())
    mesh = make_mesh(fsdp=2, expert=2, context=2)
    cfg = cases.config("sparse")
    step = make_step(cfg, cases.STEP, OptimizerConfig(), lambda step: 1e-3, mesh)
    state = step.initialise(jax.random.key(0), cases.params(cfg))
    where = NamedSharding(mesh, P(BATCH_AXES, SEQUENCE_AXES))
    batch = {k: jax.device_put(v, where) for k, v in cases.batch().items()}
    compiled = step.train.lower(state, batch).compile()
    losses, old = [], state
    for _ in range(STEPS):
        state, metrics = step.train(state, batch)
        losses.append(float(metrics["loss"]["total"]))
    expert = groups_along(mesh, "expert")
    exchanges = [
        c
        for c in find_collectives(compiled.as_text())
        if c.kind == "all-to-all" and tuple(sorted(c.groups)) == expert
    ]
    json.dump(
        {
            "losses": losses,
            "programs": step.train._cache_size(),
            "donated": all(x.is_deleted() for x in jax.tree.leaves(old)),
            "moved": [
                path
                for path, x in flatten(state).items()
                if x.sharding != flatten(step.abstract)[path].sharding
            ],
            "exchanges": len(exchanges),
            "largest_exchange": max((c.num_bytes for c in exchanges), default=0),
            "in_loop": sum(c.in_loop for c in exchanges),
            "shards": {
                path: [x.size, x.addressable_shards[0].data.size, _axes(x.sharding.spec)]
                for path, x in flatten(state).items()
            },
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
