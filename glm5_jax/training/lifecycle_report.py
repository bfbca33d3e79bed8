"""Report of a run of several stages: the initial weights, data and results of each stage on one page.

It is derived from the workdirs of the stages; `write_page` can be called again at any time.
"""

import dataclasses
import html
import json
import pathlib
from collections.abc import Sequence

from glm5_jax.metrics import html_page, plots
from glm5_jax.metrics.metrics_log import column, last_value, read
from glm5_jax.training import report
from glm5_jax.training.report_plots import HELD_OUT, HELD_OUT_REWARD, REWARD

COLUMNS = (
    "stage", "starts from", "attention", "tokens a row", "tokens",
    "training loss", "held-out bits per byte", "loss of the indexers", "held-out reward",
)  # fmt: skip
SKILLS = (
    "skills.json"  # in the workdir of the run: `rl.trainers.skill_matrix.SkillMatrix` as an object
)
RECENT = 20  # maximum rows of metrics that a loss is averaged over


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageResult:
    """First and last numbers of a stage; None where it has none.

    Attributes:
      loss, indexer: means of the first and of the last rows.
      held_out: bits per byte before the first step and after the last. Each stage has held-out rows of another
        length and mixture, so its first number is not the last one of the previous stage.
      reward: the same for held-out tasks.
    """

    name: str
    checkpoint: str | None
    attention: str
    sequence_length: int
    tokens: int
    loss: tuple[float, float] | None
    held_out: tuple[float | None, float | None]
    indexer: tuple[float, float] | None
    reward: tuple[float | None, float | None]


def read_stage(folder) -> StageResult:
    """Reads the workdir of one stage, finished or not."""
    folder = pathlib.Path(folder)
    config, rows = json.loads((folder / "config.json").read_text()), read(folder)
    return StageResult(
        name=folder.name,
        checkpoint=config["checkpoint"],
        attention=config["model"]["attention"],
        sequence_length=config.get("length") or config["data"]["sequence_length"],
        tokens=last_value(rows, "tokens") or 0,
        loss=_ends(column(rows, "loss/ce")[1]),
        held_out=_first_and_last(rows, HELD_OUT),
        indexer=_ends(column(rows, "loss/indexer")[1]),
        reward=_first_and_last(rows, HELD_OUT_REWARD),
    )


def write_page(workdir, stages: Sequence[pathlib.Path]) -> pathlib.Path:
    """Writes `report/index.html` of a workdir whose stages have folders in it; returns its path."""
    workdir = pathlib.Path(workdir)
    results = [read_stage(folder) for folder in stages]
    line = " \N{RIGHTWARDS ARROW} ".join(stage.name for stage in results)
    parts = [_table(results, stages), _skills(workdir), html_page.chart_section(_charts(stages))]
    return html_page.write(workdir / report.PAGE, workdir.resolve().name, line, parts)


def _table(results: list[StageResult], folders: Sequence[pathlib.Path]) -> str:
    rows: list[Sequence[str]] = [COLUMNS]
    for stage, folder in zip(results, folders):
        link = pathlib.Path("..") / folder.name / report.PAGE
        start = (
            "random weights" if stage.checkpoint is None else pathlib.Path(stage.checkpoint).name
        )
        cells = (
            f'<a href="{html.escape(link.as_posix())}">{html.escape(stage.name)}</a>',
            html.escape(start),
            stage.attention,
            f"{stage.sequence_length:,}",
            f"{stage.tokens:,}",
            *(_change(pair) for pair in (stage.loss, stage.held_out, stage.indexer, stage.reward)),
        )
        rows.append(cells)
    return html_page.section("Stages", html_page.table(rows))


def _skills(workdir: pathlib.Path) -> str:
    """Returns a section with the rewards of every skill after every stage, and sample replies; "" without a file."""
    path = workdir / SKILLS
    if not path.exists():
        return ""
    skills = json.loads(path.read_text())
    stages = list(next(iter(skills["rewards"].values())))
    lines = [["skill", *stages]]
    lines += [
        [name, *(f"{rewards[s]:.3f}" for s in stages)]
        for name, rewards in skills["rewards"].items()
    ]
    samples = "".join(
        html_page.details(
            f"{name}: {sample['prompt']}",
            html_page.text_table((stage, sample[stage]) for stage in stages),
        )
        for name, sample in skills["samples"].items()
    )
    return html_page.section("Skills", html_page.text_table(lines) + samples)


def _change(pair) -> str:
    if pair is None or pair == (None, None):
        return ""
    values = ["" if value is None else f"{value:.3f}" for value in pair]
    return " \N{RIGHTWARDS ARROW} ".join(value for value in values if value)


def _charts(folders):
    """Yields charts of all stages one after the other, by the tokens seen."""
    for name, label, smooth in (
        ("loss/ce", "Training loss, nats per token", True),
        (HELD_OUT, "Held-out bits per byte", False),
        ("loss/indexer", "Loss of the indexers, summed over layers", True),
        (REWARD, "Reward", True),
    ):
        series, seen = [], 0
        for folder in folders:
            rows = read(folder)
            tokens = dict(zip(*column(rows, "tokens")))
            steps, values = column(rows, name)
            points = [
                (seen + tokens.get(s, 0), v) for s, v in zip(steps, values) if not s or s in tokens
            ]
            # A stage without values keeps its entry, so that the others keep their colours.
            x, y = map(list, zip(*points)) if points else ([], [])
            series.append((folder.name, x, y))
            seen += max(tokens.values(), default=0)
        if any(y for _, _, y in series):
            yield plots.line_plot(series, label, x_label="tokens", smooth=smooth)


def _first_and_last(rows, name: str) -> tuple[float | None, float | None]:
    """Returns the values before the first step and after the last, of a number that is measured at intervals."""
    steps, values = column(rows, name)
    before = values[0] if steps and steps[0] == 0 else None
    return before, values[-1] if steps and steps[-1] else None


def _ends(values: list[float]) -> tuple[float, float] | None:
    """Returns the means of the first and of the last values, of at most a tenth of them."""
    if not values:
        return None
    count = max(1, min(RECENT, len(values) // 10))
    return sum(values[:count]) / count, sum(values[-count:]) / count
