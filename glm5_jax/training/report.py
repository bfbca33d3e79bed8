"""Report of a run: a `Summary` of its workdir, and one self-contained page with plots.

Both are derived from `config.json`, `metrics.jsonl`, `starts.jsonl` and `samples/` only, so `write_page(workdir)` can
make them again at any time. Runs in neighbouring folders are shown for comparison.
"""

import contextlib
import dataclasses
import html
import json
import pathlib
import statistics
import time
from collections.abc import Sequence

import numpy as np

from glm5_jax.metrics import charts, html_page
from glm5_jax.metrics.metrics_log import column, last_value, read
from glm5_jax.runtime.utilization import read_utilization
from glm5_jax.training.provenance import STARTS, read_starts
from glm5_jax.training.report_plots import HELD_OUT, HELD_OUT_REWARD, REWARD, run_plots

PAGE = pathlib.Path("report") / "index.html"
BASELINE_TOKENS = "baseline/tokens"
_MAX_OTHER_RUNS = 8  # that are compared, the last written ones
_MAX_OTHER_BYTES = 2**26  # of the metrics of another run
_MAX_COMPARED = 2.0**63  # of its values; a larger number is no step and no count of tokens
_RAW_FILES = ("metrics.jsonl", "config.json", STARTS, "samples", "tensorboard")


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
    usual_rates: tuple[float, float] | None  # 10th and 90th percentile of tokens per second
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
        usual_rates=(float(np.quantile(rates, 0.1)), float(np.quantile(rates, 0.9)))
        if rates
        else None,
        mfu=statistics.median(mfu) if mfu else None,
        reward=statistics.fmean(rewards[-20:]) if rewards else None,
        held_out_reward=last_value(rows, HELD_OUT_REWARD),
    )


def write_page(workdir) -> pathlib.Path:
    """Writes `report/index.html` of a workdir and returns its path."""
    workdir = pathlib.Path(workdir)
    summary, rows = summarise(workdir), read(workdir)
    config = json.loads((workdir / "config.json").read_text())
    model = config.get("model", {})
    counted = summary.baseline_tokens
    text = "the training text" if counted is None else f"{counted:,} tokens of the training text"
    figures = run_plots(rows, model, summary.baselines, text, _other_runs(workdir, config))
    parts = [
        _tiles(summary),
        html_page.chart_section(figures),
        _run_section(workdir, rows, config),
        _programs(workdir),
        _sample_section(_samples(workdir), config.get("sample", {}).get("prompts", ())),
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
        assert summary.usual_rates is not None, "there are rates"
        low, high = summary.usual_rates
        text = f"tokens per second (80%: {low:,.0f} to {high:,.0f})"
        tiles.append((f"{summary.tokens_per_second:,.0f}", text, ""))
    if summary.mfu is not None:
        tiles.append((f"{summary.mfu:.1%}", "model FLOPs utilisation", ""))
    tiles.append((f"{summary.step:,}", f"steps, {summary.tokens:,} tokens", ""))
    cells = (
        f'<div class="tile {c}"><b>{v}</b><span>{html.escape(t)}</span></div>' for v, t, c in tiles
    )
    return f'<section class="tiles">{"".join(cells)}</section>'


def _other_runs(workdir: pathlib.Path, config: dict) -> dict[str, list[dict]]:
    """Returns the metrics of other runs in the parent folder that evaluate on the same held-out data, by folder name."""
    runs: list[tuple[float, pathlib.Path]] = []
    for path in workdir.resolve().parent.glob("*/metrics.jsonl"):
        with contextlib.suppress(OSError):  # somebody may delete it now
            stat = path.stat()
            if path.parent != workdir.resolve() and stat.st_size <= _MAX_OTHER_BYTES:
                runs.append((stat.st_mtime, path.parent))
    others = {}
    for _, folder in sorted(runs, reverse=True)[:_MAX_OTHER_RUNS]:
        # No run, or one that is being written: the folders of others must not end this run.
        with contextlib.suppress(OSError, ValueError, RecursionError):
            other = json.loads((folder / "config.json").read_text())
            if isinstance(other, dict) and _held_out_data(other) == _held_out_data(config):
                others[folder.name] = [row for row in read(folder) if _is_comparable(row)]
    return others


def _is_comparable(row: dict) -> bool:
    """Returns whether the values of a row that are compared between runs are numbers that a plot can show."""
    values = [row.get(name) for name in ("step", "tokens", HELD_OUT, HELD_OUT_REWARD)]
    return all(
        value is None or (isinstance(value, int | float) and abs(value) <= _MAX_COMPARED)
        for value in values
    )


def _held_out_data(config: dict) -> tuple:
    """Returns the fields that decide on which data a run is evaluated."""
    data = config.get("data")
    names = ("sources", "held_out_fraction", "sequence_length", "packing")
    fields = [data.get(name) if isinstance(data, dict) else None for name in names]
    return *fields, config.get("tokenizer"), config.get("tasks")


def _run_section(workdir: pathlib.Path, rows: list[dict], config: dict) -> str:
    """Returns the section with what the run was started with, what it took, and links to its files."""
    starts = read_starts(workdir)
    pairs = []
    if starts:
        newest = starts[-1]
        for name in ("command", "commit", "versions", "devices", "processes"):
            if newest.get(name):
                pairs.append((name, html.escape(newest[name])))
        pairs.append(("started", html.escape(starts[0].get("time", ""))))
        if len(starts) > 1:
            times = ", ".join(
                f"{s.get('time', '')} at step {s.get('step', '')}" for s in starts[1:]
            )
            pairs.append(("resumed", html.escape(times)))
        if "parameters" in newest:
            counts = f"{newest['parameters']}, {newest.get('active')} active per token"
            pairs.append(("parameters", html.escape(counts)))
    if seconds := _duration(rows):
        pairs.append(("duration", f"{_duration_text(seconds)} of training, evaluation and saving"))
    for where in ("host", "device"):
        if peak := max(column(rows, f"system/peak_{where}_bytes")[1], default=0):
            pairs.append((f"peak memory, {where}", f"{peak / 2**30:.2f} GiB"))
    if (metrics := workdir / "metrics.jsonl").exists():
        written = time.gmtime(metrics.stat().st_mtime)
        pairs.append(("last metrics", time.strftime("%Y-%m-%d %H:%M:%S UTC", written)))
    links = (f'<a href="../{name}">{name}</a>' for name in _RAW_FILES if (workdir / name).exists())
    pairs.append(("raw data", ", ".join(links)))
    return html_page.section("Run", html_page.facts(pairs))


def _duration(rows: list[dict]) -> float:
    """Returns the seconds of the run up to its last row, over all starts, without what a resume repeated."""
    total = last = 0.0
    for seconds in column(rows, "system/elapsed_s")[1]:
        if seconds < last:  # another start
            total += last
        last = seconds
    return total + last


def _duration_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


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


def _sample_section(samples: list[tuple[int, str]], prompts: Sequence[str]) -> str:
    if not samples:
        return ""
    newest = samples[-1][0]
    items = (
        html_page.details(
            f"step {step:,}", f"<pre>{_mark_prompts(text, prompts)}</pre>", step == newest
        )
        for step, text in reversed(samples)
    )
    return html_page.section("Samples", "".join(items))


def _mark_prompts(text: str, prompts: Sequence[str]) -> str:
    """Returns the HTML of a sample text, with the prompts that it continues in bold."""
    parts = []
    for prompt in prompts:
        before, mark, after = text.partition(prompt)
        if mark:
            parts.append(f"{html.escape(before)}<b>{html.escape(mark)}</b>")
            text = after
    return "".join(parts) + html.escape(text)


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
