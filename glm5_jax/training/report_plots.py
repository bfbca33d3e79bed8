"""Plots of a run's metrics, for its report: one for every group of metrics that the run has recorded."""

import functools
from collections.abc import Iterator, Mapping, Sequence

from glm5_jax.metrics import plots
from glm5_jax.metrics.charts import Series
from glm5_jax.metrics.metrics_log import column

HELD_OUT = "held_out/bits_per_byte"
REWARD, HELD_OUT_REWARD = "reward/mean", "held_out/reward"
_SOURCE = "held_out/", "/bits_per_byte"  # before and after the name of a source
_SMOOTHED = "Thick: running mean."


def run_plots(
    rows: list[dict],
    model: dict,
    baselines: Mapping[str, float],
    counted: str,
    other_runs: Mapping[str, list[dict]],
) -> Iterator[str]:
    """Yields the figures.

    Args:
      rows: metrics of the run.
      model: fields of its model.
      baselines: bits per byte of the n-gram baselines, by name.
      counted: text that the baselines count, in words.
      other_runs: metrics of runs on the same held-out data, by name.
    """
    line_plot = functools.partial(plots.line_plot, tokens=tokens_by_step(rows))
    heat_plot = functools.partial(plots.heat_plot, tokens=tokens_by_step(rows))
    series = functools.partial(_series, rows)
    if held_out := _series(rows, HELD_OUT):
        note = f"Dashed: n-gram baselines that count {counted}." if baselines else ""
        yield line_plot(
            _named(held_out, "this run"),
            "Held-out bits per byte",
            note + _others_note(other_runs, HELD_OUT),
            levels=tuple(baselines.items()),
            other_runs=_of_others(other_runs, HELD_OUT),
        )
    if sources := _by_source(rows):
        yield line_plot(sources, "Held-out bits per byte, by source")
    if column(rows, REWARD)[0]:
        yield from _reward_plots(rows, line_plot, other_runs)
    losses = series("loss/")
    if losses:
        main = [s for s in losses if s[0] in ("ce", "mtp")] or losses
        yield line_plot(main, "Training loss, nats per token", _SMOOTHED, smooth=True)
    if rates := series("learning_rate"):
        yield line_plot(_named(rates, "learning rate"), "Learning rate")
    if norms := series("grad_norm/"):
        note = f"Before clipping, by optimiser: Muon trains matrices, AdamW the rest. {_SMOOTHED}"
        yield line_plot(norms, "Gradient norm", note, log=True, smooth=True)
    for name, title, note, first in (
        (
            "index_loss",
            "Loss of the indexers, nats",
            "KL divergence of an indexer's softmax from the attention's probabilities.",
            0,
        ),
        (
            "router/load_imbalance",
            "Largest expert load",
            "The busiest expert's tokens over the mean; 1 is perfect balance.",
            model.get("first_k_dense_replace", 0),
        ),
        ("max_logit", "Largest attention logit", "", 0),
    ):
        steps, values = column(rows, name)
        if steps:
            yield heat_plot(steps, values, title, note, rows=_layer_names(model, first))
    extra = [s for s in losses if s[0] in ("balance", "z") and any(s[2])]
    if extra:
        yield line_plot(extra, "Auxiliary losses", _SMOOTHED, smooth=True)
    if speed := series("speed/tokens_per_second"):
        note = f"Without compilation, evaluations and saves. {_SMOOTHED}"
        yield line_plot(_named(speed, "tokens/s"), "Tokens per second", note, smooth=True)


def tokens_by_step(rows: list[dict]) -> dict[int, float]:
    """Returns the tokens seen after each recorded step."""
    return dict(zip(*column(rows, "tokens")))


def _series(rows: list[dict], prefix: str, without: Sequence[str] = ()) -> list[Series]:
    """Returns (name, steps, values) of the metrics whose names begin with a prefix, without lists per layer."""
    names = dict.fromkeys(k for row in rows for k in row if k.startswith(prefix))
    columns = ((k.removeprefix(prefix), *column(rows, k)) for k in names if k not in without)
    return [s for s in columns if s[1] and not isinstance(s[2][-1], list)]


def _named(series: list[Series], name: str) -> list[Series]:
    return [(name, x, y) for _, x, y in series]


def _by_source(rows: list[dict]) -> list[Series]:
    """Returns the held-out bits per byte of each data source."""
    before, after = _SOURCE
    return [
        (name.removesuffix(after), x, y)
        for name, x, y in _series(rows, before, without=(HELD_OUT,))
        if name.endswith(after)
    ]


def _of_others(other_runs: Mapping[str, list[dict]], name: str):
    """Returns the lines of a metric of other runs, with their tokens."""
    lines = ((run, rows, column(rows, name)) for run, rows in other_runs.items())
    return [((run, *values), tokens_by_step(rows)) for run, rows, values in lines if values[0]]


def _others_note(other_runs: Mapping[str, list[dict]], name: str) -> str:
    return " Faint: other runs in the same folder." if _of_others(other_runs, name) else ""


def _reward_plots(rows: list[dict], line_plot, other_runs: Mapping[str, list[dict]]):
    series = functools.partial(_series, rows)
    if held_out := series("held_out/"):
        note = _others_note(other_runs, HELD_OUT_REWARD).strip()
        others = _of_others(other_runs, HELD_OUT_REWARD)
        yield line_plot(held_out, "Reward on held-out tasks", note, other_runs=others)
    rewards = series("reward/", without=(REWARD,))
    yield line_plot(rewards, "Reward", smooth=True)
    if parts := series("reward_part/"):
        yield line_plot(parts, "Parts of the reward", smooth=True)
    policy = {name: (steps, values) for name, steps, values in series("policy/")}
    if "clip_frac_low" in policy and "clip_frac_high" in policy:
        steps, below = policy["clip_frac_low"]
        policy["masked"] = steps, [a + b for a, b in zip(below, policy["clip_frac_high"][1])]
        policy["inside"] = steps, [1 - masked for masked in policy["masked"][1]]
    for label, names, note in (
        (
            "Entropy, nats per token",
            ("entropy",),
            "Entropy of the sampled tokens; at zero there is no exploration.",
        ),
        (
            "Difference of log-probs, nats",
            ("abs_logratio", "mismatch_kl"),
            "Engine against learner: mean absolute difference, and an estimate of the KL divergence.",
        ),
        (
            "Share of tokens masked",
            ("clip_frac_low", "clip_frac_high", "masked"),
            "Tokens outside the window of the importance ratio: on either side, and in total.",
        ),
        ("Share of tokens trained on", ("inside",), "Tokens inside the window of the ratio."),
        (
            "Staleness, steps",
            ("staleness", "staleness_mean", "version_span"),
            "Age of the sampling weights in steps: of the oldest token, on average, and spread in one attempt.",
        ),
    ):
        lines = [(name, *policy[name]) for name in names if name in policy]
        if lines:
            yield line_plot(lines, label, note, smooth=True)
    if rates := [s for s in series("mismatch/") if s[0].endswith("_match_rate")]:
        note = "Engine against learner, on the same tokens and over all layers."
        yield line_plot(rates, "Equal choices, share", note)
    if tasks := series("share/"):
        yield line_plot(tasks, "Tasks, shares of attempts", smooth=True)
    rollout = series("rollout/")
    for name in ("tokens", "seconds"):
        if lines := [s for s in rollout if s[0] == name]:
            label = f"{name.capitalize()} per attempt"
            yield line_plot(lines, label, smooth=True)
    if shares := [s for s in rollout if s[0] not in ("tokens", "seconds")]:
        yield line_plot(shares, "Attempts and groups, shares", smooth=True)
    if dropped := series("dropped/"):
        note = "By the reason why they are not trained on."
        yield line_plot(dropped, "Groups dropped per batch", note, smooth=True)
    if seconds := series("seconds/"):
        yield line_plot(seconds, "Seconds per step", smooth=True)


def _layer_names(model: dict, first: int) -> list[str]:
    return [f"layer {i}" for i in range(first, model.get("num_hidden_layers", first))] + ["mtp"]
