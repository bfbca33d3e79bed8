"""Visibility of keys: causal order by index, and documents by segment id."""

from jaxtyping import Array, Bool, Int

# Added to the logit of a key that a query must not see. It is far below any logit, and finite so that it
# causes no NaN. Adding is twice as fast as selecting on CPU.
HIDDEN = -1e30


def check_segments(
    kernel: str,
    q_segments: Int[Array, "b t"] | None,
    k_segments: Int[Array, "b s"] | None,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
) -> None:
    """Raises ValueError unless the segments have the shapes `queries` and `keys`, or both are None."""
    if q_segments is None and k_segments is None:
        return
    shapes = [None if x is None else x.shape for x in (q_segments, k_segments)]
    if shapes != [queries, keys]:
        raise ValueError(
            f"{kernel}: segments of queries {shapes[0]} and of keys {shapes[1]}; pass shapes {queries} "
            f"and {keys}, or None for both"
        )


def visible(
    query_index: Int[Array, " t"],
    key_index: Int[Array, " s"],
    query_segments: Int[Array, "b t"] | None = None,
    key_segments: Int[Array, "b s"] | None = None,
    window: int | None = None,
) -> Bool[Array, "b t s"]:
    """Returns bool[b or 1, t, s]: key index <= query index and the same segment, where segment 0 is padding.

    query_index int[t] and key_index int[s] count within the row. Segments are int[b t] and int[b s], or None
    for one document that fills the row. window: number of keys that a query sees, including its own position;
    None: all.
    """
    mask = (key_index[None, :] <= query_index[:, None])[None]
    if window is not None:
        mask = mask & (key_index[None, :] > query_index[:, None] - window)
    if query_segments is None:
        return mask
    assert key_segments is not None, "pass the segments of queries and keys, or neither"
    same_segment = query_segments[:, :, None] == key_segments[:, None, :]
    return mask & same_segment & (query_segments[:, :, None] != 0)
