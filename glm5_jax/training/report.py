"""Report of a run: a `Summary` of its workdir, and one self-contained page with plots.

Both are derived from `config.json`, `metrics.jsonl`, `starts.jsonl` and `samples/` only, so `write_page(workdir)` can
make them again at any time.
"""

import dataclasses
import functools
import html
import json
import pathlib
import statistics
from collections.abc import Sequence

import numpy as np

from glm5_jax.metrics import charts, html_page
from glm5_jax.metrics.jsonl import append_lines, read_objects
from glm5_jax.metrics.metrics_log import column, last_value, read
from glm5_jax.runtime.utilization import read_utilization

PAGE = pathlib.Path("report") / "index.html"
STARTS = "starts.jsonl"
HELD_OUT = "held_out/bits_per_byte"
REWARD, HELD_OUT_REWARD = "reward/mean", "held_out/reward"
BASELINE_TOKENS = "baseline/tokens"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Progress and results of a run. Numbers that it has not recorded are None."""

    workdir: pathlib.Path
    step: int
    tokens: int
    loss: float | None  # mean of the last 20 rows, nats per token
    bits_per_byte: float | None  # held out
    baselines: dict[str, float]  # bits per byte on the same tokens
    baseline_tokens: int | None  # tokens of training text that the baselines counted; None: all
    tokens_per_second: float | None  # median
    mfu: float | None  # median
    reward: float | None  # mean of the last 20 rows
    held_out_reward: float | None

    def __str__(self) -> str:
        lines = []
        if self.reward is not None:
            lines.append(f"reward              {self.reward:.3f} after {self.step} steps")
        if self.held_out_reward is not None:
            lines.append(f"held-out            {self.held_out_reward:.3f} reward")
        if self.loss is not None:
            lines.append(
                f"training loss       {self.loss:.4f} nats per token after {self.step} steps"
            )
        if self.bits_per_byte is not None:
            baselines = ", ".join(f"{name} {x:.3f}" for name, x in self.baselines.items())
            if self.baseline_tokens is not None:
                baselines += f", counted on {self.baseline_tokens:,} tokens"
            comparison = f"  (baselines: {baselines})" if baselines else ""
            lines.append(f"held-out            {self.bits_per_byte:.3f} bits per byte{comparison}")
        if self.tokens_per_second is not None:
            used = f", {self.mfu:.1%} of the peak" if self.mfu is not None else ""
            rate = f"{self.tokens_per_second:,.0f} tokens/s{used}"
            lines.append(f"throughput          {rate}, {self.tokens:,} tokens in all")
        lines.append(f"report              {self.workdir / PAGE}")
        return "\n".join(lines)


def summarise(workdir) -> Summary:
    """Reads a workdir and returns its summary; the run may be unfinished."""
    workdir = pathlib.Path(workdir)
    rows = read(workdir)
    rewards = column(rows, REWARD)[1]
    # In reinforcement learning a loss says little.
    losses = [] if rewards else column(rows, "loss/ce")[1]
    rates, mfu = (column(rows, f"speed/{name}")[1] for name in ("tokens_per_second", "mfu"))
    return Summary(
        workdir=workdir,
        step=max((row["step"] for row in rows), default=0),
        tokens=last_value(rows, "tokens") or 0,
        loss=statistics.fmean(losses[-20:]) if losses else None,
        bits_per_byte=last_value(rows, HELD_OUT),
        baselines=_baselines(rows),
        baseline_tokens=last_value(rows, BASELINE_TOKENS),
        tokens_per_second=statistics.median(rates) if rates else None,
        mfu=statistics.median(mfu) if mfu else None,
        reward=statistics.fmean(rewards[-20:]) if rewards else None,
        held_out_reward=last_value(rows, HELD_OUT_REWARD),
    )


def note_start(workdir, **facts: str) -> None:
    """Appends the facts of a start of the run (time, command, versions, devices) to the workdir, for the page."""
    append_lines(pathlib.Path(workdir) / STARTS, json.dumps(facts).encode() + b"\n")


def write_page(workdir) -> pathlib.Path:
    """Writes `report/index.html` of a workdir and returns its path."""
    workdir = pathlib.Path(workdir)
    summary, rows = summarise(workdir), read(workdir)
    config = json.loads((workdir / "config.json").read_text())
    model = config.get("model", {})
    parts = [
        _tiles(summary),
        html_page.chart_section(_charts(rows, model)),
        _programs(workdir),
        _start_section(workdir / STARTS),
        _sample_section(_samples(workdir)),
        _config_section(config),
    ]
    name = config.get("name", workdir.name)
    return html_page.write(workdir / PAGE, name, _model_line(model), parts)


def _baselines(rows: list[dict]) -> dict[str, float]:
    prefix = "baseline/"
    return {
        k.removeprefix(prefix): v
        for row in rows
        for k, v in row.items()
        if k.startswith(prefix) and k != BASELINE_TOKENS
    }


def _samples(workdir: pathlib.Path) -> list[tuple[int, str]]:
    files = (workdir / "samples").glob("*.txt")
    return sorted((int(f.stem), f.read_text("utf-8")) for f in files if f.stem.isdigit())


def _model_line(model: dict) -> str:
    if not model:
        return ""
    moe = model["num_hidden_layers"] - model["first_k_dense_replace"]
    return (
        f"{model['num_hidden_layers']} layers ({moe} with experts), width {model['hidden_size']}, "
        f"{model['num_attention_heads']} heads, {model['n_routed_experts']} experts of which "
        f"{model['num_experts_per_tok']} are active, vocabulary {model['vocab_size']:,}"
    )


def _tiles(summary: Summary) -> str:
    tiles = []
    if summary.bits_per_byte is not None:
        tiles.append((f"{summary.bits_per_byte:.3f}", "held-out bits per byte", "main"))
    tiles += [(f"{x:.3f}", f"{name} baseline", "") for name, x in summary.baselines.items()]
    if summary.held_out_reward is not None:
        tiles.append((f"{summary.held_out_reward:.3f}", "held-out reward", "main"))
    if summary.reward is not None:
        tiles.append((f"{summary.reward:.3f}", "reward", ""))
    if summary.loss is not None:
        tiles.append((f"{summary.loss:.3f}", "training loss, nats per token", ""))
    if summary.tokens_per_second is not None:
        tiles.append((f"{summary.tokens_per_second:,.0f}", "tokens per second", ""))
    if summary.mfu is not None:
        tiles.append((f"{summary.mfu:.1%}", "model FLOPs utilisation", ""))
    tiles.append((f"{summary.step:,}", f"steps, {summary.tokens:,} tokens", ""))
    cells = (
        f'<div class="tile {c}"><b>{v}</b><span>{html.escape(t)}</span></div>' for v, t, c in tiles
    )
    return f'<section class="tiles">{"".join(cells)}</section>'


def _charts(rows: list[dict], model: dict):
    """Yields a figure for every group of metrics that the run has recorded."""
    series = functools.partial(_series, rows)
    if held_out := column(rows, HELD_OUT)[0]:
        counted = last_value(rows, BASELINE_TOKENS)
        text = f"{counted:,} tokens of the training text" if counted else "the training text"
        yield _lines(
            [("model", held_out, column(rows, HELD_OUT)[1])],
            "Held-out bits per byte",
            f"Dashed: n-gram baselines that count {text}.",
            levels=tuple(_baselines(rows).items()),
        )
    if column(rows, REWARD)[0]:
        yield from _reward_charts(rows)
    if losses := series("loss/"):
        main = [s for s in losses if s[0] in ("ce", "mtp")] or losses
        yield _lines(main, "Training loss, nats per token", smooth=True)
    if rates := series("learning_rate"):
        yield _lines(rates, "Learning rate")
    if norms := series("grad_norm/"):
        yield _lines(norms, "Gradient norm", log=True, smooth=True)
    router, logits, index = "router/load_imbalance", "max_logit", "index_loss"
    if column(rows, index)[0]:
        names = _layer_names(model, 0)
        drawing = _layers(*column(rows, index), "Loss of the indexers, nats", names)
        yield html_page.figure(
            drawing, "KL divergence of an indexer's softmax from the attention's probabilities."
        )
    if column(rows, router)[0]:
        names = _layer_names(model, model.get("first_k_dense_replace", 0))
        drawing = _layers(*column(rows, router), "Largest expert load", names)
        yield html_page.figure(
            drawing, "The busiest expert's tokens over the mean; 1 is perfect balance."
        )
    if column(rows, logits)[0]:
        names = _layer_names(model, 0)
        yield html_page.figure(_layers(*column(rows, logits), "Largest attention logit", names))
    extra = [s for s in losses if s[0] in ("balance", "z") and any(s[2])]
    if extra:
        yield _lines(extra, "Auxiliary losses", smooth=True)
    if speed := column(rows, "speed/tokens_per_second")[0]:
        values = column(rows, "speed/tokens_per_second")[1]
        yield _lines([("", speed, values)], "Tokens per second", smooth=True)


def _series(rows: list[dict], prefix: str, without: Sequence[str] = ()) -> list[charts.Series]:
    """Returns (name, steps, values) of the metrics whose names begin with a prefix, without lists per layer."""
    names = dict.fromkeys(k for row in rows for k in row if k.startswith(prefix))
    columns = ((k.removeprefix(prefix), *column(rows, k)) for k in names if k not in without)
    return [s for s in columns if s[1] and not isinstance(s[2][-1], list)]


def _lines(series: list[charts.Series], label: str, note: str = "", **options) -> str:
    """Returns a figure with a line chart. options: as of `charts.line_chart`."""
    return html_page.figure(charts.line_chart(series, y_label=label, **options), note)


def _reward_charts(rows: list[dict]):
    series = functools.partial(_series, rows)
    if held_out := series("held_out/"):
        yield _lines(held_out, "Reward on held-out tasks")
    rewards = series("reward/", without=(REWARD,))
    yield _lines(rewards, "Reward", smooth=True)
    if parts := series("reward_part/"):
        yield _lines(parts, "Parts of the reward", smooth=True)
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
            yield _lines(lines, label, note, smooth=True)
    if rates := [s for s in series("mismatch/") if s[0].endswith("_match_rate")]:
        note = "Engine against learner, on the same tokens and over all layers."
        yield _lines(rates, "Equal choices, share", note)
    if tasks := series("share/"):
        yield _lines(tasks, "Tasks, shares of attempts", smooth=True)
    rollout = series("rollout/")
    for name in ("tokens", "seconds"):
        if lines := [s for s in rollout if s[0] == name]:
            label = f"{name.capitalize()} per attempt"
            yield _lines(lines, label, smooth=True)
    if shares := [s for s in rollout if s[0] not in ("tokens", "seconds")]:
        yield _lines(shares, "Attempts and groups, shares", smooth=True)
    if dropped := series("dropped/"):
        note = "By the reason why they are not trained on."
        yield _lines(dropped, "Groups dropped per batch", note, smooth=True)
    if seconds := series("seconds/"):
        yield _lines(seconds, "Seconds per step", smooth=True)


def _programs(workdir: pathlib.Path) -> str:
    """Returns the section with the busy intervals of each program of the run."""
    lives = read_utilization(workdir)
    if not lives:
        return ""
    first = min(life.begin for life in lives)
    spans = {
        f"{life.name} {life.pid}": [((a - first) / 60, (b - first) / 60) for a, b in life.spans]
        for life in lives
    }
    title = "Busy intervals of each program"
    size = 11.2, 0.9 + 0.3 * len(spans)
    drawing = charts.span_chart(spans, x_label="minutes", y_label=title, size=size)
    head = ("program", "process", "seconds", "busy", "idle", "cores")
    lines = (
        (life.name, str(life.pid), f"{life.end - life.begin:.0f}", f"{life.busy:.0%}")
        + (f"{1 - life.busy:.0%}", f"{life.cpu:.2f}")
        for life in lives
    )
    table = html_page.text_table([head, *lines])
    return html_page.section("Programs", html_page.figure(drawing) + table)


def _layer_names(model: dict, first: int) -> list[str]:
    return [f"layer {i}" for i in range(first, model.get("num_hidden_layers", first))] + ["mtp"]


def _layers(steps, values, label, names) -> str:
    shown = range(0, len(steps), max(1, len(steps) // 150))
    table = np.array([values[i] for i in shown], float).T
    low, high = float(np.nanmin(table)), float(np.nanquantile(table, 0.99))
    return charts.heat_map(
        table,
        [steps[i] for i in shown],
        y_label=label,
        rows=names[: len(table)],
        low=low,
        high=max(high, low + 1e-6),
    )


def _sample_section(samples: list[tuple[int, str]]) -> str:
    if not samples:
        return ""
    newest = samples[-1][0]
    items = (
        html_page.details(f"step {step:,}", f"<pre>{html.escape(text)}</pre>", step == newest)
        for step, text in reversed(samples)
    )
    return html_page.section("Samples", "".join(items))


def _start_section(file: pathlib.Path) -> str:
    """Returns the section with a table of the run's starts, the newest first."""
    starts = list(read_objects(file)) if file.exists() else []
    if not starts:
        return ""
    names = list(dict.fromkeys(name for start in starts for name in start))
    lines = [[str(start.get(name, "")) for name in names] for start in reversed(starts)]
    return html_page.section("Starts", html_page.text_table([names, *lines]))


def _config_section(config: dict) -> str:
    fields = list(_flat(config))
    listed = html_page.details(f"{len(fields)} fields", html_page.text_table(fields))
    return html_page.section("Configuration", listed)


def _flat(config: dict, path: str = ""):
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", json.dumps(value)
