"""Runs the arm of transformers: a worker process of `transformers_cpu.py`, in an environment with torch.

A variant names one way to run it: attention (eager, sdpa) and experts (eager, grouped_mm, batched_mm) by transformers'
own switches, plain or compiled, and for decoding `generate` or a loop over the model with a dynamic or a static cache:
"sdpa grouped_mm compiled static".
"""

from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]: only the worker's environment has it
from transformers import (  # pyright: ignore[reportMissingImports]: only the worker's environment has it
    AutoModelForCausalLM,
    DynamicCache,
    StaticCache,
    StoppingCriteria,
)

from experiments.benchmarks.measure import NEW_TOKENS, THREADS, Clock, gemm_rate, pin, tokens
from glm5_jax.runtime.process import serve


class TransformersArm:
    """Functions that the parent calls; every variant of a row stays until `keep` or `clear`."""

    def __init__(self):
        self.folder, self.runs = None, {}
        self.output: Any = None

    def load(self, folder: str) -> None:
        """Sets the folder of the weights."""
        self.folder = folder

    def gemm(self) -> float:
        """Returns the FLOP/s of a large matmul."""
        a = torch.ones(2048, 2048)
        return gemm_rate(lambda: a @ a)

    def prepare(self, kind: str, b: int, t: int, variant: str) -> float:
        """Prepares a variant of forward, train, prefill or decode for tokens [b t]. Returns the seconds, with a first run."""
        clock = Clock()
        model, *rest = self._model(variant)
        step = torch.compile(model, dynamic=False) if "compiled" in rest else model
        x = torch.from_numpy(tokens(b, t)).long()
        if kind == "decode":
            self.runs[variant] = DECODING[rest[-1]](model, step, x)
        else:
            self.runs[variant] = RUNS[kind](model, step, x)
        self.measure(variant)
        return clock.read()["wall"]

    def choose(self, kind: str, b: int, t: int, variant: str, choices: str) -> None:
        """Runs a plain variant of forward or train once for `save`, and writes its choices to choices.npz.

        They are the keys int32[b t k] (-1 at the end) and experts int32[m a] of its layers, as keys_00, ..., experts_00, ...
        """
        model, *_ = self._model(variant)
        x = torch.from_numpy(tokens(b, t)).long()
        seen = {}

        def watch(kind, choice):
            def hook(module, args, out):
                seen[f"{kind}_{sum(name.startswith(kind) for name in seen):02}"] = choice(out)

            return hook

        for name, module in model.named_modules():
            if name.endswith(".indexer"):
                module.register_forward_hook(watch("keys", _visible))
            elif name.endswith(".gate"):
                module.register_forward_hook(watch("experts", lambda out: out[2].int().numpy()))
        _, self.output = RUNS[kind](model, model, x)()
        np.savez(choices, **seen)

    def _model(self, variant: str) -> list:
        """Returns the model, then the words of the variant after attention and experts."""
        attention, experts, *rest = variant.split()
        model = AutoModelForCausalLM.from_pretrained(
            self.folder,
            dtype=torch.float32,
            attn_implementation=attention,
            experts_implementation=experts,
        )
        model.generation_config.eos_token_id = None
        return [model, *rest]

    def measure(self, variant: str) -> dict[str, float]:
        """Returns {"wall", "cpu"} seconds of one run."""
        seconds, self.output = self.runs[variant]()
        return seconds

    def keep(self, variant: str) -> None:
        """Drops all other variants."""
        self.runs = {variant: self.runs[variant]}

    def clear(self) -> None:
        """Drops all variants and their compiled programs."""
        self.runs, self.output = {}, None
        torch.compiler.reset()

    def save(self, path: str) -> None:
        """Writes the last run's output: logits or tokens as .npy, gradients as a HuggingFace folder."""
        if isinstance(self.output, torch.Tensor):
            np.save(path, self.output.numpy())
            return
        model = self.output
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.save_pretrained(path, state_dict=gradients)


def _forward(model, step, x):
    model.eval()

    @torch.inference_mode()
    def run():
        clock = Clock()
        logits = step(x, use_cache=False).logits
        return clock.read(), logits

    return run


def _train(model, step, x):
    """Returns a run of the mean next-token loss and the gradients of all parameters, without an optimiser."""
    model.train()

    def run():
        clock = Clock()
        model.zero_grad(set_to_none=True)
        logits = step(x, use_cache=False).logits
        torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()
        ).backward()
        return clock.read(), model

    return run


def _prefill(model, step, x):
    """Returns a run that samples the first token after x and fills a cache for the next ones."""
    model.eval()

    @torch.inference_mode()
    def run():
        clock, cache = Clock(), DynamicCache(config=model.config)
        logits = step(x, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return clock.read(), logits[:, -1].argmax(-1, keepdim=True)

    return run


RUNS = {"forward": _forward, "train": _train, "prefill": _prefill}


def _visible(topk):
    """Returns transformers' choice as int32[b t k], ascending; keys after their query become -1."""
    keys = topk.numpy().astype(np.int32)
    t = keys.shape[1]
    keys = np.sort(np.where(keys <= np.arange(t)[:, None], keys, t), axis=-1)
    return np.where(keys < t, keys, -1)


class _Stopwatch(StoppingCriteria):
    """Times `generate` from its first new token, without the prefill."""

    def __init__(self):
        self.clock = self.seconds = None

    def __call__(self, input_ids, scores, **kwargs):
        if self.clock is None:
            self.clock = Clock()
        self.seconds = self.clock.read()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _generate(model, step, x):
    model.eval()

    @torch.inference_mode()
    def run():
        stopwatch = _Stopwatch()
        out = model.generate(
            x,
            max_new_tokens=NEW_TOKENS + 1,
            do_sample=False,
            use_cache=True,
            stopping_criteria=[stopwatch],
        )
        return stopwatch.seconds, out[:, x.shape[1] :]

    return run


def _loop(make_cache):
    """Returns a decoding that calls the model step by step; only the steps may be compiled, not the prefill."""

    def decoding(model, step, x):
        model.eval()
        b, t = x.shape

        @torch.inference_mode()
        def run():
            cache = make_cache(model.config, t + NEW_TOKENS)
            logits = model(x, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            out = [logits[:, -1].argmax(-1, keepdim=True)]
            clock = Clock()
            for i in range(NEW_TOKENS):
                positions = torch.full((b, 1), t + i)
                logits = step(
                    out[-1], past_key_values=cache, use_cache=True, position_ids=positions
                ).logits
                out.append(logits[:, -1].argmax(-1, keepdim=True))
            return clock.read(), torch.cat(out, dim=1)

        return run

    return decoding


DECODING = {
    "generate": _generate,
    "dynamic": _loop(lambda config, length: DynamicCache(config=config)),
    "static": _loop(lambda config, length: StaticCache(config=config, max_cache_len=length)),
}


def main() -> None:
    """Serves the parent's calls."""
    pin()
    torch.set_num_threads(THREADS)
    arm = TransformersArm()
    serve(arm.load, arm.gemm, arm.prepare, arm.measure, arm.choose, arm.keep, arm.clear, arm.save)


if __name__ == "__main__":
    main()
