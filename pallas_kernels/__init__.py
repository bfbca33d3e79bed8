"""The kernels of the model: one public function per package, with its meaning in XLA and its Pallas forms.

    lightning_indexer        scores of the sparse attention's indexer and their exact top-k
    sparse_flash_attention   MLA over the selected latents
    flash_mla                attention over all visible keys
    head_probs               its probabilities summed over heads, for a block of queries
    index_scores             scores of the indexer, with gradients
    indexer_kl               what the indexer learns from in the dense warm-up
    sparse_indexer_kl        and over the selected keys
    grouped_matmul           rows sorted by expert, each through its own expert's weights
    w4a8_matmul              int8 rows times int4 weights, dense and by expert
    mla_prologue             projections, norms, rotation and cache write before attention
    cross_entropy            output projection and its loss, without the logits as a whole
    gated_delta              linear attention with a gate and the delta rule, in chunks or step by step

Every package holds `ref.py` (runs anywhere and says what is meant) and, where there is one, `tpu.py`
(Mosaic) and `gpu.py` (Mosaic GPU, Hopper). `dispatch.choose` picks one of them.
"""
