"""Defines the axis letters and their sizes for a config.

The same letters are used in einsum strings, weight declarations and docstrings (`t` and `s` may coincide):

    b batch               t query positions      s key positions       d model width
    n heads               h nope head dim        r rope head dim       u value head dim
    q query latent        c key/value latent     i index heads         j index head dim
    k selected keys       e experts              a active experts      f feed-forward width
    m routed rows         v vocabulary           l layers              p pages
    z slots per page      g rollouts in a group  y key/value heads     w taps of a convolution
    o rank of an adapter

A weight whose dimension joins two of them is declared with both letters: `hr` is h + r, `cr` is
c + r, `dd` is 2 d. `f` is the width of the module that declares it (dense, routed or shared).
"""

from glm5_jax.config import ModelConfig

LETTERS = "btsdnhruqcijkeafmvlpzgywo"


def sizes(cfg: ModelConfig) -> dict[str, int]:
    """Returns the size of every weight axis of a `ModelConfig`, except `f`, which each declaring module sets."""
    return {
        "d": cfg.hidden_size,
        "dd": 2 * cfg.hidden_size,
        "n": cfg.num_attention_heads,
        "h": cfg.qk_nope_head_dim,
        "r": cfg.qk_rope_head_dim,
        "hr": cfg.qk_nope_head_dim + cfg.qk_rope_head_dim,
        "u": cfg.v_head_dim,
        "q": cfg.q_lora_rank,
        "c": cfg.kv_lora_rank,
        "cr": cfg.kv_lora_rank + cfg.qk_rope_head_dim,
        "i": cfg.index_n_heads,
        "j": cfg.index_head_dim,
        "e": cfg.n_routed_experts,
        "v": cfg.vocab_size,
        "y": cfg.num_key_heads,
        "w": cfg.linear_conv_kernel_dim,
    }
