"""Report of a run: a `Summary` of its workdir, and one self-contained page with plots.

Both are derived from `config.json`, `metrics.jsonl` and `samples/` only, so `write_page(workdir)` can make
them again at any time.
"""

import dataclasses
import html
import json
import pathlib
import statistics

import numpy as np

from glm5_jax.metrics import charts
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.runtime.utilization import read_utilization

PAGE = pathlib.Path("report") / "index.html"
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
        tokens=(column(rows, "tokens")[1] or [0])[-1],
        loss=statistics.fmean(losses[-20:]) if losses else None,
        bits_per_byte=(column(rows, HELD_OUT)[1] or [None])[-1],
        baselines=_baselines(rows),
        baseline_tokens=(column(rows, BASELINE_TOKENS)[1] or [None])[-1],
        tokens_per_second=statistics.median(rates) if rates else None,
        mfu=statistics.median(mfu) if mfu else None,
        reward=statistics.fmean(rewards[-20:]) if rewards else None,
        held_out_reward=(column(rows, HELD_OUT_REWARD)[1] or [None])[-1],
    )


def write_page(workdir) -> pathlib.Path:
    """Writes `report/index.html` of a workdir and returns its path."""
    workdir = pathlib.Path(workdir)
    summary, rows = summarise(workdir), read(workdir)
    config = json.loads((workdir / "config.json").read_text())
    title = html.escape(config.get("name", workdir.name))
    model = config.get("model", {})
    body = [
        f"<header><h1>{title}</h1><p>{html.escape(_model_line(model))}</p></header>",
        _tiles(summary),
        f'<section class="charts">{"".join(_charts(rows, model))}</section>',
        _programs(workdir),
        _sample_section(_samples(workdir)),
        _config_section(config),
    ]
    path = workdir / PAGE
    path.parent.mkdir(exist_ok=True)
    path.write_text(page(title, [part for part in body if part]))
    return path


def page(title: str, body: list[str]) -> str:
    """Returns a self-contained page, light and dark. title is escaped text, body a list of sections in HTML."""
    return _PAGE.replace("{title}", title).replace("{body}", "\n".join(body))


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
    return sorted((int(f.stem), f.read_text()) for f in files if f.stem.isdigit())


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

    def series(prefix, without=()):
        names = dict.fromkeys(k for row in rows for k in row if k.startswith(prefix))
        columns = ((k.removeprefix(prefix), *column(rows, k)) for k in names if k not in without)
        return [s for s in columns if s[1] and not isinstance(s[2][-1], list)]

    def figure(drawing, note=""):
        caption = f"<figcaption>{note}</figcaption>" if note else ""
        return f"<figure>{drawing}{caption}</figure>"

    if held_out := column(rows, HELD_OUT)[0]:
        name = "Held-out bits per byte"
        drawing = charts.line_chart(
            [("model", held_out, column(rows, HELD_OUT)[1])],
            y_label=name,
            levels=tuple(_baselines(rows).items()),
        )
        counted = column(rows, BASELINE_TOKENS)[1]
        text = f"{counted[-1]:,} tokens of the training text" if counted else "the training text"
        yield figure(drawing, f"Dashed: n-gram baselines that count {text}.")
    if column(rows, REWARD)[0]:
        yield from _reward_charts(series, figure)
    if losses := series("loss/"):
        main = [s for s in losses if s[0] in ("ce", "mtp")] or losses
        yield figure(charts.line_chart(main, y_label="Training loss, nats per token", smooth=True))
    if rates := series("learning_rate"):
        yield figure(charts.line_chart(rates, y_label="Learning rate"))
    if norms := series("grad_norm/"):
        yield figure(charts.line_chart(norms, y_label="Gradient norm", log=True, smooth=True))
    router, logits, index = "router/load_imbalance", "max_logit", "index_loss"
    if column(rows, index)[0]:
        names = _layer_names(model, 0)
        drawing = _layers(*column(rows, index), "Loss of the indexers, nats", names)
        yield figure(
            drawing, "KL divergence of an indexer's softmax from the attention's probabilities."
        )
    if column(rows, router)[0]:
        names = _layer_names(model, model.get("first_k_dense_replace", 0))
        drawing = _layers(*column(rows, router), "Largest expert load", names)
        yield figure(drawing, "The busiest expert's tokens over the mean; 1 is perfect balance.")
    if column(rows, logits)[0]:
        names = _layer_names(model, 0)
        yield figure(_layers(*column(rows, logits), "Largest attention logit", names))
    extra = [s for s in losses if s[0] in ("balance", "z") and any(s[2])]
    if extra:
        yield figure(charts.line_chart(extra, y_label="Auxiliary losses", smooth=True))
    if speed := column(rows, "speed/tokens_per_second")[0]:
        values = column(rows, "speed/tokens_per_second")[1]
        yield figure(
            charts.line_chart([("", speed, values)], y_label="Tokens per second", smooth=True)
        )


def _reward_charts(series, figure):
    if held_out := series("held_out/"):
        yield figure(charts.line_chart(held_out, y_label="Reward on held-out tasks"))
    rewards = series("reward/", without=(REWARD,))
    yield figure(charts.line_chart(rewards, y_label="Reward", smooth=True))
    if parts := series("reward_part/"):
        yield figure(charts.line_chart(parts, y_label="Parts of the reward", smooth=True))
    policy = {name: (steps, values) for name, steps, values in series("policy/")}
    if "below" in policy and "above" in policy:
        steps, below = policy["below"]
        policy["masked"] = steps, [a + b for a, b in zip(below, policy["above"][1])]
        policy["inside"] = steps, [1 - masked for masked in policy["masked"][1]]
    for label, names, note in (
        (
            "Entropy, nats per token",
            ("entropy",),
            "Entropy of the sampled tokens; at zero there is no exploration.",
        ),
        (
            "Difference of log-probs, nats",
            ("mismatch", "mismatch_kl"),
            "Engine against learner: mean absolute difference, and an estimate of the KL divergence.",
        ),
        (
            "Share of tokens masked",
            ("below", "above", "masked"),
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
            yield figure(charts.line_chart(lines, y_label=label, smooth=True), note)
    if equal := [s for s in series("agreement/") if s[0] in ("keys", "experts")]:
        drawing = charts.line_chart(equal, y_label="Equal choices, share")
        yield figure(drawing, "Engine against learner, on the same tokens and over all layers.")
    if tasks := series("share/"):
        yield figure(charts.line_chart(tasks, y_label="Tasks, shares of attempts", smooth=True))
    rollout = series("rollout/")
    for name in ("tokens", "seconds"):
        if lines := [s for s in rollout if s[0] == name]:
            label = f"{name.capitalize()} per attempt"
            yield figure(charts.line_chart(lines, y_label=label, smooth=True))
    if shares := [s for s in rollout if s[0] not in ("tokens", "seconds")]:
        yield figure(charts.line_chart(shares, y_label="Attempts and groups, shares", smooth=True))
    if dropped := series("dropped/"):
        drawing = charts.line_chart(dropped, y_label="Groups dropped per batch", smooth=True)
        yield figure(drawing, "By the reason why they are not trained on.")
    if seconds := series("seconds/"):
        yield figure(charts.line_chart(seconds, y_label="Seconds per step", smooth=True))


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
    lines = (
        (html.escape(life.name), life.pid, f"{life.end - life.begin:.0f}", f"{life.busy:.0%}")
        + (f"{1 - life.busy:.0%}", f"{life.cpu:.2f}")
        for life in lives
    )
    head = ("program", "process", "seconds", "busy", "idle", "cores")
    table = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in (head, *lines)
    )
    return f"<section><h2>Programs</h2><figure>{drawing}</figure><table>{table}</table></section>"


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
    items = [
        f"<details{' open' if i == 0 else ''}><summary>step {step:,}</summary>"
        f"<pre>{html.escape(text)}</pre></details>"
        for i, (step, text) in enumerate(reversed(samples))
    ]
    return f"<section><h2>Samples</h2>{''.join(items)}</section>"


def _config_section(config: dict) -> str:
    flat = list(_flat(config))
    rows = (f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in flat)
    return (
        f"<section><h2>Configuration</h2><details><summary>{len(flat)} fields</summary>"
        f"<table>{''.join(rows)}</table></details></section>"
    )


def _flat(config: dict, path: str = ""):
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", json.dumps(value)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --paper: #ffffff; --ink: #171a21; --muted: #667085; --line: #e4e7ec;
  --series-1: #3b5bdb; --series-2: #d9480f; --series-3: #2b8a3e; --series-4: #9c36b5;
  --series-5: #0b7285; --series-6: #a61e4d; --series-7: #846300; --series-8: #495057;
  --series-9: #087f5b; --series-10: #5f3dc4;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1115; --paper: #171a21; --ink: #eceef2; --muted: #98a2b3; --line: #2a2f3a;
    --series-1: #91a7ff; --series-2: #ffa94d; --series-3: #69db7c; --series-4: #e599f7;
    --series-5: #66d9e8; --series-6: #faa2c1; --series-7: #ffd43b; --series-8: #ced4da;
    --series-9: #38d9a9; --series-10: #b197fc;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 40px 24px 64px; max-width: 1180px; background: var(--page);
  color: var(--ink); font: 15px/1.5 Inter, system-ui, "Segoe UI", Roboto, "Helvetica Neue",
  Arial, sans-serif; -webkit-font-smoothing: antialiased;
}
h1 { margin: 0; font-size: 28px; letter-spacing: -.02em; }
h2 { margin: 40px 0 12px; font-size: 18px; letter-spacing: -.01em; }
header p { margin: 4px 0 24px; color: var(--muted); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; }
.tile, figure, details {
  background: var(--paper); border: 1px solid var(--line); border-radius: 12px;
}
.tile { padding: 16px 18px; }
.tile b { display: block; font-size: 26px; font-weight: 650; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: 13px; }
.tile.main b { color: var(--series-1); }
.charts { display: grid; gap: 12px; margin-top: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }
figure { margin: 0; padding: 16px 16px 12px; }
figure svg { display: block; height: auto; }
figcaption { color: var(--muted); font-size: 13px; padding: 4px 4px 0; }
details { margin-bottom: 8px; padding: 10px 16px; }
summary { cursor: pointer; color: var(--muted); font-variant-numeric: tabular-nums; }
pre { margin: 10px 0 4px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
table { width: 100%; margin-top: 8px; border-collapse: collapse; font-size: 13px; }
td { padding: 5px 8px; border-top: 1px solid var(--line); vertical-align: top; }
td:first-child { color: var(--muted); white-space: nowrap; width: 1%; }
details td:last-child { font-family: ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
</style>
</head>
<body>
{body}
</body>
</html>
"""
