"""Who sees whom: causal order by index, and documents by segment id."""

# Added to the logit of a key that a query must not see: far below any logit and finite, so that no
# NaN can come of it. Adding is twice as fast as selecting on CPU.
HIDDEN = -1e30


def visible(query_index, key_index, query_segments=None, key_segments=None, window=None):
    """bool[b or 1, t, s]: key index <= query index and the same segment, where 0 is padding.

    query_index int[t], key_index int[s] count within the row; segments int[b t] and int[b s], or None
    for one document that fills the row. window: how many keys back a query sees, its own included (None:
    all).
    """
    mask = (key_index[None, :] <= query_index[:, None])[None]
    if window is not None:
        mask = mask & (key_index[None, :] > query_index[:, None] - window)
    if query_segments is None:
        return mask
    same = query_segments[:, :, None] == key_segments[:, None, :]
    return mask & same & (query_segments[:, :, None] != 0)
