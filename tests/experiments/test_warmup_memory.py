"""Arithmetic of the memory benchmark."""

import mmap

from experiments.benchmarks import warmup_memory


def test_growth_tells_linear_from_quadratic_memory():
    lengths = (8192, 16_384, 32_768)
    linear = warmup_memory.growth({t: 1000 + 64 * t for t in lengths})
    assert linear == {16_384: 64, 32_768: 64}
    first, second = warmup_memory.growth({t: t * t for t in lengths}).values()
    assert second == 2 * first


def test_square_bytes_count_every_head():
    cfg = warmup_memory.one_layer()
    assert warmup_memory.square_bytes(cfg, 32_768) == 64 * 32_768**2 * 4
    assert (cfg.hidden_size, cfg.index_n_heads) == (6144, 32)


def test_peak_is_at_least_resident_memory():
    before = warmup_memory.resident_bytes("VmRSS")
    with mmap.mmap(-1, 2**24) as held:  # other memory might be reused for an array
        held.write(bytes(2**24))
        assert warmup_memory.resident_bytes("VmHWM") >= before + 2**23
