"""Renders conversations to token records. Each batch of a stage trains on some of them, next to the attempts."""

from collections.abc import Sequence

from glm5_jax.data.conversation import Conversation, make_records
from glm5_jax.data.record import TokenRecord
from glm5_jax.rl.config import RlConfig
from glm5_jax.text.tokenizer import Tokenizer


def render_conversations(
    conversations: Sequence[Conversation], config: RlConfig, tokenizer: Tokenizer
) -> list[TokenRecord]:
    """Returns the records of conversations.

    Raises ValueError if there are conversations without `sft_rows` or the other way round, and if one exceeds a row.
    """
    if bool(config.sft_rows) != bool(conversations):
        raise ValueError(
            f"sft_rows is {config.sft_rows} and there are {len(conversations)} conversations; give both "
            "conversations and their number in a batch, or neither"
        )
    records = [
        record
        for conversation in conversations
        for record in make_records(conversation, tokenizer, variant=config.chat_variant)
    ]
    if too_long := [len(record) for record in records if len(record) > config.length]:
        raise ValueError(
            f"a conversation has {too_long[0]} tokens and a row {config.length}; raise length, or leave it out"
        )
    return records


def select_records(records: Sequence[TokenRecord], batch: int, count: int) -> list[TokenRecord]:
    """Returns the `count` records of batch number `batch`. All records are used in turn."""
    return [records[i % len(records)] for i in range(batch * count, (batch + 1) * count)]
