"""The work split, shared memory map and TMEM map over many shapes: every piece of work once, no two regions overlapping."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe_aot.menu import menu_specs
from megamoe_aot.shared_memory import GROUP_BYTES, MAX_DYNAMIC_SHARED, STAGE_BYTES
from megamoe_aot.spec import KernelSpec, SpecError
from megamoe_aot.tensor_memory import MAX_COLUMNS, TensorMemory

MENU = [spec for _, spec in menu_specs()]
LATER_SHAPES = [  # (H, I, E) of ../models: not in the menu yet, but the design must hold them
    (6144, 2048, 256),
    (7168, 256, 256),
    (7168, 2048, 256),
    (7168, 128, 384),
    (3072, 384, 256),
    (3072, 1536, 256),
    (6144, 640, 160),
    (6144, 1280, 160),
    (4096, 1536, 128),
    (2048, 256, 512),
]


@st.composite
def specs(draw: st.DrawFn) -> KernelSpec:
    """Any spec that the rules admit."""
    spec = KernelSpec(
        hidden=1024 * draw(st.integers(1, 8)),
        inter=128 * draw(st.integers(1, 20)),
        experts=32 * draw(st.integers(1, 16)),
        top_k=draw(st.integers(1, 10)),
        arch=draw(st.sampled_from(["sm_90a", "sm_100f"])),
        layout=draw(st.sampled_from(["trtllm_gen", "row_major"])),
        cluster=draw(st.sampled_from([8, 16])),
    )
    try:
        assert spec.plan
    except SpecError:
        from hypothesis import assume

        assume(False)
    return spec


def check_coverage(spec: KernelSpec) -> None:
    """Every (64-row half tile, K block) of both weight matrices is loaded by exactly one CTA, once."""
    seen: Counter[tuple[int, int, int]] = Counter()
    for cta in range(spec.cluster):
        stages = list(spec.split.stages(cta))
        assert len(stages) == spec.split.stages1 + spec.split.stages2
        for gemm, row, rows, block in stages:
            assert rows % 64 == 0 and row % 64 == 0 and rows * 128 <= STAGE_BYTES
            seen.update((gemm, half, block) for half in range(row // 64, (row + rows) // 64))
    wanted = {(1, half, block) for half in range(2 * spec.inter // 64) for block in range(spec.hidden // 128)}
    wanted |= {(2, half, block) for half in range(spec.hidden // 64) for block in range(spec.inter // 128)}
    assert set(seen) == wanted
    assert set(seen.values()) == {1}


def check_shared_memory(spec: KernelSpec) -> None:
    """Regions lie one behind the other within the budget of two CTAs per SM, and nothing overlaps."""
    shared, split = spec.shared, spec.split
    assert shared.total <= MAX_DYNAMIC_SHARED and 2 * (shared.total + 1024) <= 228 * 1024
    regions = [(STAGE_BYTES * s, STAGE_BYTES) for s in range(shared.ring)]
    groups = [shared.operand_group(b) for b in range(shared.operand_blocks)]
    regions += [(g, GROUP_BYTES) for g in groups]
    if shared.zero_group is not None:
        regions.append((shared.zero_group, GROUP_BYTES))
    regions += [
        (shared.sums, split.parts * split.tiles1 * 512),
        (shared.staging, 512),
        (shared.w13_scale, 4 * split.units * split.unit_blocks),
        (shared.x_scale, 4 * split.unit_blocks),
        (shared.w2_scale, 4 * split.tiles2 * split.blocks2),
        (shared.hidden_scale, 4 * split.blocks2),
        (shared.ids, 128),
        (shared.tmem, 4),
    ]
    regions += [(at, 8 * shared.barrier_counts[name][0]) for name, at in shared.barriers.items()]
    used = bytearray(shared.total)
    for start, size in regions:
        assert start + size <= shared.total
        assert not any(used[start : start + size]), f"byte in [{start}, {start + size}) belongs to two regions of {spec.name}"
        used[start : start + size] = b"\1" * size
    assert all(g % 1024 == 0 for g in groups)
    for scales in (shared.w13_scale, shared.x_scale, shared.w2_scale, shared.hidden_scale, shared.sums, shared.staging):
        assert scales % 16 == 0


def check_blackwell(spec: KernelSpec) -> None:
    """Descriptor strides are positive multiples of 1024; TMEM accumulators are disjoint and leave room for a second CTA."""
    shared, split, memory = spec.shared, spec.split, TensorMemory.of(spec.split)
    zero = shared.zero_group
    assert zero is not None
    for block in range(shared.operand_blocks):
        own = shared.operand_group(block)
        stride = zero - own if block % 16 < 8 else own - zero
        assert 0 < stride < 1 << 18 and stride % 1024 == 0
    columns: Counter[int] = Counter()
    for unit in range(split.units):
        columns.update(unit * memory.unit_columns + b for b in range(split.unit_blocks))
    for tile in range(split.tiles2):
        columns.update(memory.tiles + tile * memory.tile_columns + b for b in range(split.blocks2))
    assert max(columns.values()) == 1
    assert max(columns) < memory.allocated and memory.allocated & (memory.allocated - 1) == 0
    if spec.cluster == 16:
        assert memory.allocated <= MAX_COLUMNS


def check(spec: KernelSpec) -> None:
    check_coverage(spec)
    check_shared_memory(spec)
    if spec.engine == "blackwell":
        check_blackwell(spec)


@pytest.mark.parametrize("spec", {s.code: s for s in MENU}.values(), ids=lambda s: s.code_name)
def test_menu(spec: KernelSpec) -> None:
    check(spec)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
@pytest.mark.parametrize("shape", LATER_SHAPES, ids=str)
def test_later_shapes(shape: tuple[int, int, int], arch: str) -> None:
    hidden, inter, experts = shape
    check(KernelSpec(hidden, inter, experts, 8, arch))


@settings(max_examples=60, deadline=None)
@given(specs())
def test_any_spec(spec: KernelSpec) -> None:
    check_coverage(spec)
    check_shared_memory(spec)


def test_lead_numbers() -> None:
    """The lead entry by hand: H=4096, I=512 -> 8 tiles x 2 K halves; one unit of 16 K blocks and 256 output rows per CTA."""
    lead = KernelSpec(4096, 512, 288, 8, "sm_100f")
    split = lead.split
    assert (split.parts, split.units, split.unit_blocks, split.rows2, split.tile2_rows) == (2, 1, 16, 256, 128)
    assert [(split.tile(c, 0), split.part(c)) for c in (0, 1, 2, 15)] == [(0, 0), (0, 1), (1, 0), (7, 1)]
    assert sum(rows * 128 for c in range(16) for _, _, rows, _ in split.stages(c)) == 3 * 4096 * 512
    assert TensorMemory.of(split).allocated == 64
    assert lead.grid(3) == 16 * 3 * 8


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden": 4000}, "multiple of 1024"),
        ({"inter": 192}, "zero-pad it to 256"),
        ({"experts": 100}, "multiple of 32"),
        ({"top_k": 33}, "top_k"),
        ({"arch": "sm_120a"}, "arch"),
        ({"layout": "trtllm_gen", "w13_order": "gate_up"}, "up rows first"),
        ({"limit": -1.0}, "limit"),
        ({"cluster": 4}, "cluster"),
        ({"scoring": "sqrt_softplus"}, "scoring"),
    ],
)
def test_refused(change: dict[str, object], word: str) -> None:
    fields = {"hidden": 4096, "inter": 512, "experts": 288, "top_k": 8, "arch": "sm_100f"} | change
    with pytest.raises(SpecError, match=word):
        KernelSpec.from_dict(fields)


def test_round_trip_and_code() -> None:
    for spec in MENU:
        assert KernelSpec.from_dict(spec.to_dict()) == spec
        assert spec.code.limit is None and spec.code.scale == 1.0
    assert len({s.name for s in MENU}) == len(MENU)
    assert len({s.code_name for s in MENU}) == len({s.code for s in MENU}) == 120  # 5 shapes, 2 targets, 2 layouts, 2 dtypes, 3 structures
