"""Describes a checkpoint and checks whether it loads, from its config and the headers of its files only.

    glm5 check_checkpoint FOLDER [--model=FOLDER]

FOLDER is a HuggingFace folder (bf16, FP8 or int4), a repository owner/name of the hub, a folder that quantise.py wrote,
a run's workdir, or a folder with adapters in PEFT's form. Adapters are checked against --model, the folder of the
model that they belong to.

The config is checked before the tensors. Of each kind of problem five examples are shown. The exit code is 0 if the
checkpoint loads, 1 if it does not, and 2 for a wrong argument.
"""

import collections
import dataclasses
import json
import logging
import math
import pathlib
import sys

from rich.console import Console
from rich.table import Table

from experiments.arguments import Parser
from glm5_jax.checkpoint import hf_files, hf_import, models, peft_adapters, store
from glm5_jax.checkpoint.hub import fetch_checkpoint
from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5, lora
from glm5_jax.runtime.files import read_text
from glm5_jax.runtime.terminal import make_printable, print_error
from glm5_jax.text.tokenizer import Tokenizer

RUN, HF, QUANTISED, ADAPTERS = "run", "HuggingFace folder", "quantised model", "PEFT adapters"
# Bits of one number, by safetensors' name of its dtype.
BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "BF16": 16, "F16": 16, "I8": 8, "U8": 8}


@dataclasses.dataclass(kw_only=True)
class CheckpointReport:
    """Description of a checkpoint.

    Attributes:
      kind: kind of the folder.
      is_checked: whether the tensors were compared with a model.
      rows: names and texts to print.
      problems: reasons why it does not load; empty: it loads.
      commands: commands that use it.
    """

    kind: str
    is_checked: bool = True
    rows: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    commands: list[str] = dataclasses.field(default_factory=list)


def main(arguments: list[str]) -> int:
    """Runs the program with these arguments. Returns the exit code."""
    parser = Parser("experiments.check_checkpoint", __doc__)
    parser.add_argument("folder", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--model", type=pathlib.Path, help="folder of the model of adapters")
    try:
        options = parser.parse_args(arguments)
        folder, model = fetch_checkpoint(options.folder), options.model
        if not folder.exists():
            raise ValueError(f"{folder} does not exist; give the folder of a checkpoint")
        model = None if model is None else fetch_checkpoint(model)
    except ValueError as error:
        print_error(error)
        return 2
    # What the readers log is a row of the report, or repeats one.
    logging.disable(logging.WARNING)
    try:
        report = inspect(folder, model)
    finally:
        logging.disable(logging.NOTSET)
    show(report, folder)
    return 1 if report.problems else 0


def inspect(folder: pathlib.Path, model: pathlib.Path | None = None) -> CheckpointReport:
    """Returns the report on a checkpoint; model: folder of the model of adapters, or None."""
    if (folder / peft_adapters.CONFIG).is_file() and not (folder / "config.json").exists():
        return _inspect_adapters(folder, model)
    report = CheckpointReport(kind=_kind(folder))
    try:
        cfg, _ = models.read_config(folder)
        report.rows += _describe(cfg)
        if report.kind != RUN:
            report.rows += _stored(folder)
        _check_tensors(folder, report.kind, cfg)
    except (ValueError, OSError) as error:
        report.problems.append(str(error))
        return report
    report.rows += _tokenizer(folder, cfg, report.problems)
    report.commands.append(f"glm5 serve {folder}")
    if report.kind != QUANTISED:
        # The first has rows of 8,192 tokens, the second of 1,024.
        size = "flash" if cfg.max_position_embeddings >= 8192 else "tiny_lora"
        report.commands.append(
            f"glm5 run sft:{size},mixed --checkpoint={folder} --data.sources=\"[{{'chats': 'CHATS.jsonl'}}]\""
        )
    return report


def _kind(folder: pathlib.Path) -> str:
    if (folder / "checkpoints").is_dir() or (folder / "model").is_dir():
        return RUN
    try:
        return QUANTISED if hf_import.is_quantised(folder) else HF
    except ValueError:  # config.json is not JSON, which reading it reports
        return HF


def _check_tensors(folder: pathlib.Path, kind: str, cfg: ModelConfig) -> None:
    """Raises ValueError unless the files have the tensors of a config."""
    if kind == RUN:
        stored = models.run_config(folder)
        abstract = glm5.abstract_params(lora.without_adapters(stored))
        store.check_params(folder, abstract)
    elif kind == QUANTISED:
        hf_import.open_quantised(folder)
    else:
        hf_import.check_params(folder, cfg)


def _describe(cfg: ModelConfig) -> list[tuple[str, str]]:
    """Returns rows on the architecture."""
    moe = cfg.num_moe_layers
    layers = f"{cfg.num_hidden_layers} ({cfg.num_hidden_layers - moe} dense, {moe} of experts)"
    mtp = f", {cfg.num_nextn_predict_layers} MTP" if cfg.num_nextn_predict_layers else ""
    keys = f", top {cfg.index_topk:,} keys" if cfg.index_topk and cfg.attention == "sparse" else ""
    return [
        ("model type", cfg.model_type),
        ("parameters", f"{cfg.num_parameters:,}, {cfg.num_active_parameters:,} active"),
        ("layers", layers + mtp),
        ("experts", f"{cfg.n_routed_experts}, {cfg.num_experts_per_tok} per token"),
        ("attention", f"{cfg.attention}{keys}, {cfg.max_position_embeddings:,} positions"),
        ("dtype of computation", cfg.dtype),
    ]


def _stored(folder: pathlib.Path) -> list[tuple[str, str]]:
    """Returns rows on the files. Raises ValueError if one cannot be read."""
    tensors = hf_files.open_tensors(folder).values()
    counts, num_bytes = collections.Counter(), 0
    for tensor in tensors:
        counts[tensor.kind] += 1
        num_bytes += math.prod(tensor.shape) * BITS.get(tensor.kind, 8) // 8
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())
    files = len({tensor.file for tensor in tensors})
    return [("files", f"{files}, {num_bytes / 1e9:,.2f} GB"), ("tensors", kinds)]


def _tokenizer(
    folder: pathlib.Path, cfg: ModelConfig, problems: list[str]
) -> list[tuple[str, str]]:
    """Returns rows on the tokenizer; adds a problem if it has more ids than the embedding."""
    try:
        tokenizer = models.load_tokenizer(folder)
    except (ValueError, OSError) as error:
        return [("tokenizer", f"none that loads: {' '.join(str(error).split())}")]
    if tokenizer.vocab_size > cfg.vocab_size:
        problems.append(
            f"the tokenizer has {tokenizer.vocab_size:,} ids and the embedding {cfg.vocab_size:,} rows; give the "
            "tokenizer of this model"
        )
    return [
        ("tokenizer", f"{tokenizer.vocab_size:,} ids; the embedding has {cfg.vocab_size:,} rows"),
        ("chat template", _template(tokenizer)),
    ]


def _template(tokenizer: Tokenizer) -> str:
    if tokenizer.chat_template is None:
        return "none in the folder"
    return f"{len(tokenizer.chat_template):,} characters"


def _inspect_adapters(folder: pathlib.Path, model: pathlib.Path | None) -> CheckpointReport:
    """Returns the report on adapters, checked against a model if there is one."""
    report = CheckpointReport(kind=ADAPTERS)
    try:
        if model is None:
            content = json.loads(read_text(folder / peft_adapters.CONFIG))
            report.rows += [(name, str(content.get(name))) for name in ("r", "lora_alpha")]
            report.rows.append(("base model", str(content.get("base_model_name_or_path"))))
            report.is_checked = False
            return report
        cfg, leaves = peft_adapters.load_adapter(folder, models.read_config(model)[0])
    except (ValueError, OSError, AttributeError) as error:
        report.problems.append(str(error))
        return report
    targets = sorted(
        {path.removesuffix(lora.B).rpartition("/")[2] for path in leaves if path.endswith(lora.B)}
    )
    report.rows += [
        ("rank", f"{cfg.lora.rank}, alpha {cfg.lora.alpha:g}"),
        ("parameters", f"{sum(leaf.size for leaf in leaves.values()):,}"),
        ("targets", ", ".join(targets)),
    ]
    report.commands.append(f"glm5 serve {model} --adapter={folder}")
    return report


def show(report: CheckpointReport, folder: pathlib.Path) -> None:
    """Prints a report. The line breaks of problems are kept."""
    console = Console()
    table = Table(show_header=False, title=f"{folder}: {report.kind}", title_justify="left")
    for name, text in report.rows:
        table.add_row(name, make_printable(text))
    if report.rows:
        console.print(table, markup=False)
    for problem in report.problems:
        print(f"does not load: {make_printable(problem)}")
    if not report.is_checked:
        print("not checked: give --model=FOLDER, the model that the adapters belong to")
    elif not report.problems:
        print("loads")
        for command in report.commands:
            print(f"  {command}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
