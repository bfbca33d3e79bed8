"""Pallas kernels of the model: one public function per package, each with an XLA reference and Pallas forms.

    lightning_indexer        scores of the sparse attention's indexer and their exact top-k
    top_k                    exact top-k of long rows
    sparse_flash_attention   MLA over the selected latents
    flash_mla                attention over all visible keys
    summed_attention_probs   attention probabilities summed over heads, for a block of queries
    index_scores             scores of the indexer, with gradients
    indexer_kl               indexer loss of the dense warm-up, over all visible keys
    sparse_indexer_kl        indexer loss of the sparse stage, over the selected keys
    grouped_matmul           rows sorted by expert, each multiplied with its expert's weights
    w4a8_matmul              int8 rows times int4 weights, dense and by expert
    mla_prologue             projections, norms, rotation and cache write before attention
    cross_entropy            output projection and its loss, without the full logits in memory
    gated_delta              linear attention with a gate and the delta rule, in chunks or step by step
    scatter_rows             in-place write of new rows into a cache

Every package holds `ref.py`, which defines the result in a few lines, and, where they exist, `xla.py` (the fast form
without Pallas, on any platform), `tpu.py` (Mosaic) and `gpu.py` (Mosaic GPU, Hopper). `backends.select_backend` picks
one of them.
"""
