"""Instructions in the text of a compiled program, and how often its loops run."""

import pytest

from launch.aot.hlo_text import count_runs, parse_hlo, shape_bytes, tuple_elements

LOOP = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%body (state: (s32[], s32[], f32[8])) -> (s32[], s32[], f32[8]) {{
  %state = (s32[], s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %n = s32[] get-tuple-element(%state), index=1
  %x = f32[8] get-tuple-element(%state), index=2
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  ROOT %out = (s32[], s32[], f32[8]) tuple(%next, %n, %x)
}}

%compared (p: s32[], q: s32[]) -> pred[] {{
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  ROOT %less = pred[] compare(%p, %q), direction={direction}
}}

%condition (state.1: (s32[], s32[], f32[8])) -> pred[] {{
  %state.1 = (s32[], s32[], f32[8]) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %n.1 = s32[] get-tuple-element(%state.1), index=1
  %ten = s32[] constant(10)
  ROOT %test = pred[] fusion({compared}), kind=kLoop, calls=%compared
}}

ENTRY %main (x: f32[8], m: s32[]) -> f32[8] {{
  %x.2 = f32[8] parameter(0)
  %m = s32[] parameter(1)
  %three = s32[] constant(3)
  %seven = s32[] constant(7)
  %copy = s32[] copy(%three)
  %init = (s32[], s32[], f32[8]) tuple({begin}, {bound}, %x.2)
  %loop = (s32[], s32[], f32[8]) while(%init), condition=%condition, body=%body{noted}
  ROOT %y = f32[8] get-tuple-element(%loop), index=2
}}
"""
SIMPLE = {
    "step": 1,
    "direction": "LT",
    "compared": "%i.1, %ten",
    "begin": "%copy",
    "bound": "%seven",
    "noted": "",
}


@pytest.mark.parametrize(
    ("changed", "times"),
    [
        ({}, 7),
        ({"direction": "LE"}, 8),
        ({"direction": "NE"}, 7),
        ({"direction": "GT", "compared": "%ten, %i.1"}, 7),
        ({"compared": "%i.1, %n.1"}, 4),  # the bound is carried by the loop
        ({"begin": "%seven"}, 3),
        ({"noted": ', backend_config={"known_trip_count":{"n":"75"},"x":1}'}, 75),
        ({"step": 2}, None),
        ({"step": 0}, None),
        ({"begin": "%m"}, None),
        ({"compared": "%i.1, %n.1", "bound": "%m"}, None),
        ({"direction": "GT"}, None),
    ],
)
def test_counts_trips_of_loop_with_constant_bound(changed, times):
    runs = count_runs(parse_hlo(LOOP.format(**(SIMPLE | changed))))
    assert runs["body"] == (times, True)
    assert runs["condition"] == (None if times is None else times + 1, True)
    assert runs["main"] == (1, False)


NESTED = """\
HloModule jit_f

%inner (a: f32[8]) -> f32[8] {
  ROOT %a = f32[8] parameter(0)
}

%outer (b: f32[8]) -> f32[8] {
  %b = f32[8] parameter(0)
  %first = f32[8] while(%b), condition=%test, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %called = f32[8] call(%first), to_apply=%shared
}

%shared (c: f32[8]) -> f32[8] {
  ROOT %c = f32[8] parameter(0)
}

%left (l: f32[8]) -> f32[8] {
  ROOT %l = f32[8] parameter(0)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %loop = f32[8] while(%x), condition=%test.1, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  %once = f32[8] call(%loop), to_apply=%shared
  %begun = ((f32[8]), f32[8], s32[]) async-start(%once), calls=%started
  %ended = f32[8] async-done(%begun), calls=%started
  ROOT %either = f32[8] conditional(%p, %ended, %ended), branch_computations={%left, %right}
}
"""


def test_multiplies_runs_along_calls_and_adds_callers():
    names = ("test", "test.1", "right", "started")
    ends = "".join(
        f"%{n} (z: f32[8]) -> f32[8] {{\n  ROOT %z = f32[8] parameter(0)\n}}\n\n" for n in names
    )
    runs = count_runs(parse_hlo(NESTED.replace("%inner (", ends + "%inner (", 1)))
    assert runs["outer"] == (3, True)
    assert runs["inner"] == (15, True)
    assert runs["test"] == (3 * 6, True)
    assert runs["shared"] == (3 + 1, True)
    assert runs["started"] == runs["left"] == runs["right"] == (1, False)


def test_reads_bytes_and_elements_of_shapes():
    assert shape_bytes("bf16[64,256]{1,0:T(8,128)(2,1)S(1)}") == 64 * 256 * 2
    assert shape_bytes("(f32[8]{0}, pred[4]{0}, s4[3], u32[], token[])") == 32 + 4 + 2 + 4
    assert shape_bytes("f8e4m3fn[5,2]") == 10
    nested = "((f32[8]{0:T(8,128)}, s32[]), /*index=1*/bf16[2,2]{1,0}, (u32[]))"
    assert tuple_elements(nested) == ["(f32[8]{0:T(8,128)}, s32[])", "bf16[2,2]{1,0}", "(u32[])"]
    assert tuple_elements("f32[2,3]{1,0}") == ["f32[2,3]{1,0}"]
    assert tuple_elements("()") == []


def test_reads_operands_names_and_sources_of_instructions():
    text = """\
HloModule jit_f, num_partitions=4, replica_count=2

ENTRY %main.1 (x: f32[8,8]) -> f32[8,8] {
  %x.1 = f32[8,8]{1,0:T(8,128)} parameter(0), metadata={op_name="x"}
  ROOT %dot.2 = f32[8,8]{1,0} dot(f32[8,8]{1,0:T(8,128)} %x.1, %x.1), lhs_contracting_dims={1}, \
metadata={op_name="jit(f)/a(b)/dot_general" source_line=3}
}
"""
    module = parse_hlo(text)
    main = module.computations["main.1"]
    assert (module.entry, module.num_devices, main.root) == ("main.1", 8, "dot.2")
    dot = main.instructions["dot.2"]
    assert (dot.opcode, dot.operands, dot.num_bytes) == ("dot", ["x.1", "x.1"], 256)
    assert dot.op_name == "jit(f)/a(b)/dot_general"
    assert [p.name for p in main.parameters()] == ["x.1"]
    with pytest.raises(ValueError, match="no ENTRY.*as_text"):
        parse_hlo("HloModule nothing\n")
