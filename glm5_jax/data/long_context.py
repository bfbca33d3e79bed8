"""Configures the data of mid-training: more long documents, interleaved similar documents, and recall tasks.

The paper (2.3) extends the context in three stages. Each uses natural long documents, synthetic data with long-range
dependencies, and similar texts interleaved in packing. Long documents are up-sampled in the later stages, and at 200K a
small share of MRCR-like recall is added. It discloses no share: every number of `MidTrainingShares` and `STAGES` is ours.
"""

import dataclasses
from collections.abc import Sequence

from glm5_jax.data.document import Document
from glm5_jax.data.interleave import InterleaveConfig
from glm5_jax.data.sources import SourceConfig, is_held_out, open_documents
from glm5_jax.data.synthetic import LongContextTaskConfig, LongContextTasks
from glm5_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(kw_only=True, frozen=True)
class TaskSourceConfig:
    """Tasks of one kind and length (synthetic.py) as a source of a mixture. Raises ValueError for a bad weight.

    Attributes:
      tasks: options of the tasks; an epoch has `tasks.size` of them. Training and held-out tasks differ, and each uses
        haystacks from its side of the split.
      weight: share of the rows, relative to the other sources.
    """

    tasks: LongContextTaskConfig
    weight: float = 1.0

    def __post_init__(self):
        if not self.weight > 0:
            raise ValueError(
                f"the weight of source {self.name!r} is {self.weight}; make it positive"
            )

    @property
    def name(self) -> str:
        """The name of the source in errors and metrics."""
        return f"{self.tasks.kind}:{self.tasks.surface}:{self.tasks.length}"

    @property
    def length(self) -> int:
        """The tokens of a task."""
        return self.tasks.length

    def open(self, tokenizer: Tokenizer, fraction: float, *, training: bool) -> LongContextTasks:
        """Opens the records of one side of the split. Raises ValueError if it has no text for a haystack, or no items."""
        if not training and not fraction:
            raise ValueError(f"source {self.name!r}: nothing is held out; raise held_out_fraction")
        hay = None
        if self.tasks.surface == "text":
            hay = SplitView(self.tasks.source, fraction, training=training)
        stream = "train" if training else "held_out"
        return LongContextTasks(self.tasks, tokenizer, source=hay, stream=stream)


class SplitView:
    """Sequence of the texts of one side of a source's held-out split; opening reads every document once."""

    def __init__(self, config: SourceConfig, fraction: float, *, training: bool):
        self._documents = open_documents(config)
        self._read = lambda document: select_split(document, fraction, training=training)
        count = len(self._documents)
        self._numbers = [i for i in range(count) if self._read(self._documents[i])]
        if not self._numbers:
            split = "training" if training else "held-out"
            raise ValueError(
                f"source {config.name!r} has no {split} document: {count} "
                f"document(s), held_out_fraction {fraction}; add documents or change the fraction"
            )

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> str:
        document = self._read(self._documents[self._numbers[index]])
        assert document is not None, "only documents with text in the split have a number"
        return "".join(document.texts())


def select_split(document: Document, fraction: float, *, training: bool) -> Document | None:
    """Returns a document without the parts on the other side of the held-out split.

    Returns None if no part is left, which includes a document without text.
    """
    return document.select(lambda text: is_held_out(text, fraction) != training)


@dataclasses.dataclass(frozen=True)
class MidTrainingShares:
    """Shares of the rows of a stage. The rest is short documents. The paper does not disclose them.

    Attributes:
      long: share of documents of at least half a row.
      interleaved: share of interleaved similar documents.
      recall: share of MRCR-like tasks.
    """

    long: float
    interleaved: float
    recall: float = 0.0

    def __post_init__(self):
        if min(self.long, self.interleaved, self.recall) < 0 or not self.short > 0:
            raise ValueError(
                f"the shares are long {self.long}, interleaved {self.interleaved} and recall "
                f"{self.recall}; make none negative and their sum less than 1"
            )

    @property
    def short(self) -> float:
        """The share of shorter documents, which are not selected further."""
        return 1 - self.long - self.interleaved - self.recall


# By the tokens of a row in mid-training (paper 2.3). The paper says that long documents are up-sampled later, and that a
# small share of recall is added at 200K only. The numbers are ours.
STAGES = {
    32_768: MidTrainingShares(long=0.3, interleaved=0.1),
    131_072: MidTrainingShares(long=0.45, interleaved=0.15),
    202_752: MidTrainingShares(long=0.45, interleaved=0.15, recall=0.05),
}


def mid_training_sources(
    short: Sequence[SourceConfig],
    long: Sequence[SourceConfig],
    shares: MidTrainingShares,
    length: int,
    *,
    characters_per_token: float = 4.0,
    recall: LongContextTaskConfig | None = None,
    interleave: InterleaveConfig | None = None,
) -> tuple[SourceConfig | TaskSourceConfig, ...]:
    """Returns the sources of a stage of mid-training with rows of `length` tokens.

    - short: sources of single texts. Texts below half a row are used, separately and interleaved.
    - long: sources of long documents; those of at least half a row are used. They may be the same as `short`. The
      weights of each are relative to each other.
    - shares: shares of the rows.
    - characters_per_token: estimated characters of a token.
    - recall: options of the recall tasks; None: MRCR-like tasks of the row's length on text.
    - interleave: options of interleaving; None: up to 16 documents that fill a row, in chunks of 1024 tokens, or of a
      32nd of a short row.
    """
    half = int(length * characters_per_token / 2)
    options = interleave or InterleaveConfig(
        documents=16,
        characters=int(length * characters_per_token),
        chunk=max(1, min(1024, length // 32)),
    )
    uses = (
        (short, shares.short, {"max_characters": half}),
        (long, shares.long, {"min_characters": half}),
        (short, shares.interleaved, {"interleave": options}),
    )
    sources_of_stage = []
    for sources, share, changes in uses:
        total = sum(source.weight for source in sources)
        for source in sources if share else ():
            weight = share * source.weight / total
            sources_of_stage.append(dataclasses.replace(source, weight=weight, **changes))
    if shares.recall:
        tasks = recall or LongContextTaskConfig(kind="mrcr", length=length)
        sources_of_stage.append(TaskSourceConfig(tasks=tasks, weight=shares.recall))
    return tuple(sources_of_stage)
