"""Large buffers in a device's memory, from the compiler's errors, texts and dumps."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.compilation_cache import compilation_cache

from launch.aot.buffers import (
    DeviceBuffer,
    find_large_buffers,
    parse_allocations,
    parse_memory_error,
    read_dump,
    temporary_bytes,
)

GIB = 2**30

TPU_REFUSES = """\
RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (223.52G) \
exceeds available HBM (95.74G)."""

TPU_LISTS = """\
RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 21.95G \
of 15.48G hbm. Exceeded hbm capacity by 6.47G.

Total hbm usage >= 22.47G:
    reserved        530.00M
    program          21.95G
    arguments            0B

Program hbm requirement 21.95G:
    HLO temp         21.92G (100.0% utilization: Unpadded (21.90G) Padded (21.92G), 0.3% fragmentation (40M))

  Largest program allocations in hbm:

  1. Size: 4.50G
     Operator: op_name="jit(train)/while/body/tanh" source_file="model.py" source_line=3
     Shape: f32[32,4096,9216]{1,2,0:T(8,128)}
     Unpadded size: 4.50G
     XLA label: fusion.5 = fusion(copy.1), kind=kLoop, calls=fused_computation.9
     Allocation type: HLO temp
     ==========================

  2. Size: 512.00M
     Shape: u32[12582912,1]{1,0:T(8,128)}
     Unpadded size: 48.00M
     Extra memory due to padding: 464.00M (10.7x expansion)
     XLA label: copy.2 = copy(fusion.5)
     Allocation type: HLO temp
     ==========================
"""

GPU_LISTS = """\
RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6291456 bytes.
BufferAssignment OOM Debugging.
Peak buffers:
\tBuffer 1:
\t\tSize: 384.0KiB
\t\tEntry Parameter Subshape: f32[256,128,3]
\t\t==========================

\tBuffer 2:
\t\tSize: 6.00MiB
\t\tOperator: op_name="jit(f)/concatenate" source_file="f.py" source_line=689
\t\tXLA Label: concatenate
\t\tShape: f32[4096,128,3]
\t\t==========================
"""


def test_reads_needed_and_available_memory_of_error():
    sizes = parse_memory_error(TPU_REFUSES)
    assert sizes == (round(223.52 * GIB), round(95.74 * GIB))
    assert parse_memory_error(TPU_LISTS) == (round(21.95 * GIB), round(15.48 * GIB))
    early = "Aborting early: unlikely to have enough memory. Requires 3.50T, has 14.49G available."
    assert parse_memory_error(early) == (round(3.5 * 1024 * GIB), round(14.49 * GIB))
    assert parse_memory_error(GPU_LISTS) is None


def test_names_allocations_of_error_by_operation():
    assert parse_allocations(TPU_LISTS) == [
        (round(4.5 * GIB), "jit(train)/while/body/tanh"),
        (512 * 2**20, "copy.2 = copy(fusion.5)"),
    ]
    assert parse_allocations(GPU_LISTS) == [
        (6 * 2**20, "jit(f)/concatenate"),
        (384 * 1024, "f32[256,128,3]"),
    ]
    assert parse_allocations(TPU_REFUSES) == []


# Output of libtpu 0.0.42 for a scan that keeps two arrays of each layer, shortened.
SCAN = """\
HloModule jit_saved, is_scheduled=true

%fused (a: f32[12,64,32], b: s32[], c: f32[64,32]) -> f32[12,64,32] {
  %a = f32[12,64,32]{2,1,0:T(8,128)} parameter(0)
  %c = f32[64,32]{1,0:T(8,128)} parameter(2)
  %b = s32[]{:T(128)} parameter(1)
  %row = f32[1,64,32]{2,1,0:T(8,128)} bitcast(%c)
  ROOT %dus = f32[12,64,32]{2,1,0:T(8,128)} dynamic-update-slice(%a, %row, %b, %b, %b), metadata={op_name="jit(saved)/while/body/dynamic_update_slice"}
}

%body (s: (s32[], f32[64,32], f32[12,64,32], f32[12,64,32])) -> (s32[], f32[64,32], f32[12,64,32], f32[12,64,32]) {
  %s = (s32[]{:T(128)}, f32[64,32]{1,0:T(8,128)S(1)}, f32[12,64,32]{2,1,0:T(8,128)}, f32[12,64,32]{2,1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  %x = f32[64,32]{1,0:T(8,128)S(1)} get-tuple-element(%s), index=1
  %inputs = f32[12,64,32]{2,1,0:T(8,128)} get-tuple-element(%s), index=2
  %slopes = f32[12,64,32]{2,1,0:T(8,128)} get-tuple-element(%s), index=3
  %slope = f32[64,32]{1,0:T(8,128)} negate(%x), metadata={op_name="jit(saved)/while/body/sub"}
  %keep.1 = f32[12,64,32]{2,1,0:T(8,128)} fusion(%inputs, %i, %x), kind=kLoop, calls=%fused
  %keep.2 = f32[12,64,32]{2,1,0:T(8,128)} fusion(%slopes, %i, %slope), kind=kLoop, calls=%fused
  %next = f32[64,32]{1,0:T(8,128)S(1)} tanh(%x), metadata={op_name="jit(saved)/while/body/tanh"}
  ROOT %out = (s32[]{:T(128)}, f32[64,32]{1,0:T(8,128)S(1)}, f32[12,64,32]{2,1,0:T(8,128)}, f32[12,64,32]{2,1,0:T(8,128)}) tuple(%i, %next, %keep.1, %keep.2)
}

ENTRY %main (w: f32[12,32,32], x.1: f32[64,32]) -> f32[] {
  %w = f32[12,32,32]{2,1,0:T(8,128)} parameter(0), metadata={op_name="w"}
  %half = bf16[12,32,32]{2,1,0:T(8,128)(2,1)} convert(%w)
  %zero = s32[]{:T(128)} constant(0)
  %copy = f32[64,32]{1,0:T(8,128)S(1)} copy(%half)
  %space = f32[12,64,32]{2,1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer", metadata={op_name="broadcast.1"}
  %space.1 = f32[12,64,32]{2,1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer", metadata={op_name="broadcast.1"}
  %pair = (f32[8]{0}, bf16[6,7]{1,0}) fusion(%w), kind=kLoop, calls=%unknown, metadata={op_name="jit(saved)/pair"}
  %init = (s32[]{:T(128)}, f32[64,32]{1,0:T(8,128)S(1)}, f32[12,64,32]{2,1,0:T(8,128)}, f32[12,64,32]{2,1,0:T(8,128)}) tuple(%zero, %copy, %space, %space.1)
  %loop = (s32[]{:T(128)}, f32[64,32]{1,0:T(8,128)S(1)}, f32[12,64,32]{2,1,0:T(8,128)}, f32[12,64,32]{2,1,0:T(8,128)}) while(%init), condition=%test, body=%body
  ROOT %sum = f32[]{:T(128)} constant(0)
}
"""

RANGES = """\
HloLiveRange (max 84):
  InstructionSequence:
    0:w
  BufferLiveRange:
    w{}:0-84
  Live ranges at 29 (peak):
    space{}: 98304 bytes (cumulative: 98304 bytes)
    space.1{}: 98304 bytes (cumulative: 196608 bytes)
    w{}: 49152 bytes (cumulative: 245760 bytes)
    half{}: 24576 bytes (cumulative: 270336 bytes)
    copy{}: 8192 bytes (cumulative: 278528 bytes)
    pair{1}: 84 bytes (cumulative: 278612 bytes)
  Stack trace breakdown for peak usage: 278 612 bytes
    main (100.0%, total: 278 612 bytes, current: 0 bytes, remaining: 278 612 bytes)
    keep.1{}: 98304 bytes (cumulative: 98304 bytes)
"""


def test_names_buffers_at_peak_by_operation():
    num_bytes = 12 * 64 * 32 * 4
    alive = [
        DeviceBuffer(
            num_bytes, "jit(saved)/while/body/tanh", "f32[12,64,32]"
        ),  # activations between layers
        DeviceBuffer(num_bytes, "jit(saved)/while/body/sub", "f32[12,64,32]"),
        DeviceBuffer(49152, "w", "f32[12,32,32]"),
        DeviceBuffer(24576, "convert of w", "bf16[12,32,32]"),
        DeviceBuffer(84, "jit(saved)/pair", "bf16[6,7]"),
    ]
    text = SCAN.replace("calls=%unknown, ", "calls=%pairs, ").replace(
        "ENTRY", "%pairs (p: f32[12,32,32]) -> (f32[8], bf16[6,7]) {\n"
        "  ROOT %made = (f32[8]{0}, bf16[6,7]{1,0}) custom-call()\n}\n\nENTRY"
    )  # fmt: skip
    assert find_large_buffers(text, 1, RANGES) == alive
    assert find_large_buffers(text, 25000, RANGES) == alive[:3]
    with pytest.raises(ValueError, match="live-range"):
        find_large_buffers(text, 1, "nothing")


@pytest.mark.parametrize(
    ("layout", "counts"),
    [("{1,0:T(8,128)}", 1), ("{1,0:T(8,128)S(1)}", 0), ("{1,0:S(1)}", 1), ("{1,0:T(8,128)S(5)}", 0), ("{1,0:S(5)}", 0)],
)  # fmt: skip
def test_counts_only_main_memory_of_chip(layout, counts):
    text = f"HloModule f\n\nENTRY %main (x: f32[8,8]) -> f32[8,8] {{\n  ROOT %x = f32[8,8]{layout} parameter(0)\n}}\n"
    assert len(find_large_buffers(text, 1)) == counts


def test_counts_every_large_array_without_live_ranges():
    buffers = find_large_buffers(SCAN, 10_000)
    assert [b.shape for b in buffers] == ["f32[12,64,32]"] * 2 + ["f32[12,32,32]", "bf16[12,32,32]"]
    assert [b.what.rpartition("/")[2] for b in buffers[:2]] == ["tanh", "sub"]


@pytest.fixture
def no_cache():
    """Disables the compilation cache, because XLA dumps only programs that it compiles."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def test_finds_buffers_of_compiled_program(tmp_path, no_cache):
    def saved(w, x):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    shapes = (
        jax.ShapeDtypeStruct((12, 64, 64), "float32"),
        jax.ShapeDtypeStruct((512, 64), "float32"),
    )
    with pytest.raises(FileNotFoundError, match="xla_dump_to"):
        read_dump(tmp_path)
    assert temporary_bytes(tmp_path) is None
    lowered = jax.jit(jax.grad(saved)).lower(*shapes)
    compiled = lowered.compile(compiler_options={"xla_dump_to": str(tmp_path)})
    assert temporary_bytes(tmp_path) == compiled.memory_analysis().temp_size_in_bytes
    text, ranges = read_dump(tmp_path)
    buffers = find_large_buffers(text, 12 * 512 * 64 * 4, ranges)
    assert buffers and {b.shape for b in buffers} == {"f32[12,512,64]"}
    names = [
        b.what for b in buffers
    ]  # each layer's input, which is the tanh before it, and tanh's slope
    assert names == [
        f"jit(saved)/jvp()/while/body/closed_call/{n}" for n in ("tanh", "tanh", "sub")
    ]
    memory = compiled.memory_analysis()
    everything = sum(b.num_bytes for b in find_large_buffers(text, 0, ranges))
    in_use = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert 0.8 < everything / in_use <= 1


def test_counts_temporaries_of_main_memory(tmp_path):
    (tmp_path / "module_0001.after_optimizations-buffer-assignment.txt").write_text("""\
allocation 0: size 512, thread-local:
allocation 1: size 4096, parameter 0, shape |f32[1024]| at ShapeIndex {}:
allocation 2: size 1000, preallocated-temp:
 value: <1 add @0> (size=900,offset=100): f32[225]
allocation 3: size 33554432, color 1, preallocated-temp:
allocation 4: size 20, preallocated-temp:
""")
    assert temporary_bytes(tmp_path) == 1020
