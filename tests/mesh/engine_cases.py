"""Requests to an engine on eight devices, of one process or of several (engine_process.py)."""

import jax
import numpy as np

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig, Request
from glm5_jax.inference.runner import WeightSource
from glm5_jax.inference.sampling import Sampling
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import make_mesh
from tests.mesh import cases

AXES = {"fsdp": 2, "expert": 2, "tensor": 2}
OPTIONS = dict(page_size=8, max_length=32, max_num_seqs=2, num_pages=10, prefill_chunk=32)
CFG = cases.config("sparse")  # with a layer that drafts


def scaled(source) -> dict:
    """Returns the weights of a source: those of the model times a factor, on the mesh."""
    if source["factor"] == 0:
        raise ValueError("the factor is 0")
    return on_mesh(jax.tree.map(lambda x: x * source["factor"], cases.params(CFG)))


def on_mesh(params) -> dict:
    shardings = glm5.param_shardings(CFG, make_mesh(AXES), params)
    return jax.tree.map(
        lambda x, where: jax.make_array_from_callback(x.shape, where, np.asarray(x).__getitem__),
        params,
        shardings,
    )


def replies(engine: Engine) -> list:
    """Returns (ids, log-probs, versions, reason of the end) of requests, with cancels, new weights and moved pages."""
    rng = np.random.default_rng(0)
    lengths = (3, 9, 20, 1, 14, 7, 11, 2, 5)
    prompts = [rng.integers(0, CFG.vocab_size, n).tolist() for n in lengths]
    samplings = [
        Sampling(max_tokens=6, temperature=i % 2, seed=i, top_k=5 * (i == 3), ignore_eos=True)
        for i in range(len(prompts))
    ]
    handles = [engine.submit(Request(ids, one)) for ids, one in zip(prompts, samplings)]
    for _ in range(3):
        engine.step()
    handles[1].cancel(), handles[8].cancel()
    while engine.step():
        pass
    for factor, version in ((0, 1), (1.5, 2)):
        source = WeightSource(fields={"factor": factor})
        handles += [engine.submit(Request(prompts[2], samplings[2]))]
        engine.step()
        try:
            engine.update_weights(source, version, "recompute")
        except ValueError as error:
            assert "the factor is 0" in str(error)
        while engine.step():
            pass
    # Other ranks get the pages of a prompt, as from an engine that only prefills.
    part = engine.read_prefix(prompts[2], 0)
    assert part is not None and part.count == 2
    ranks = range(engine.dp_size)
    added = [engine.write_prefix(prompts[2], part, engine.version, rank) for rank in ranks]
    rank = added.index(part.count)
    handles.append(engine.submit(Request(prompts[2], samplings[2], dp_rank=rank)))
    while engine.step():
        pass
    assert handles[-1].cached_tokens == 16
    completions = [handle.completion for handle in handles]
    return [[one.ids, one.logprobs, one.versions, one.finish_reason] for one in completions]


NUM_REPLIES = 12
CASES = {"plain": (replies, 0), "drafts": (replies, 2)}


def inputs(case: str) -> tuple[glm5.Glm5, EngineConfig]:
    """Returns the model and the config of a case's engine."""
    model = glm5.Glm5(CFG, params=on_mesh(cases.params(CFG)), mesh=make_mesh(AXES))
    return model, EngineConfig(**OPTIONS, num_speculative_tokens=CASES[case][1])


def run(case: str, **options) -> list:
    """Returns the result of a case. options: further arguments of `Engine`."""
    model, config = inputs(case)
    engine = Engine(model, config=config, open_weights=scaled, **options)
    return CASES[case][0](engine)
