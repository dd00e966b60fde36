"""The public entry: schedules, processes, arguments, and what a result says."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from emulator import OFF, POLICIES, Arithmetic, Buffer, Launch, Pointer, SparseBuffer, TensorMap, emulate
from tests.emulator import test_copies, test_tcgen05, test_wgmma
from tests.emulator.tiny import module, run, store

TWO_POINTERS = [Pointer("in"), Pointer("out")]


def buffers(size: int = 4) -> list[Buffer]:
    return [Buffer("in", np.zeros(size, np.uint8)), Buffer("out", np.zeros(size, np.uint8), "output")]


def test_the_same_seed_gives_the_same_run_in_one_process_or_two() -> None:
    body = "mul.lo.s32 %r10, %r6, 3;" + store()
    runs = [run(body, clusters=5, jobs=jobs, seed=3) for jobs in (1, 2)]
    for done in runs:
        assert done.result.ok
        assert done.out.tolist() == [3 * i for i in range(160)]
    assert runs[0].result.steps == runs[1].result.steps
    assert runs[0].result.counts == runs[1].result.counts
    assert [t.events for t in runs[0].result.timelines.values()] == [t.events for t in runs[1].result.timelines.values()]


@pytest.mark.parametrize("jobs", [1, 2])
def test_clusters_that_store_to_the_same_bytes(jobs: int) -> None:
    done = run("griddepcontrol.wait; setp.ne.b32 %p1, %r1, 0; @!%p1 st.global.b32 [%rd2], %r6;", clusters=2, jobs=jobs)
    assert done.ids == {"E-RACE"}


def test_every_policy_and_seed_gives_the_same_result() -> None:
    results = {run(test_copies.EXCHANGE, ctas=2, policy=p, seed=s, checks=OFF).out.tobytes() for p in POLICIES for s in range(4)}
    assert len(results) == 1


def test_schedules_differ_between_seeds() -> None:
    orders = [
        [(e.kind, e.cta, e.lane, e.label) for e in run(test_copies.EXCHANGE, ctas=2, seed=s).result.timelines[0].events] for s in range(4)
    ]
    assert any(order != orders[0] for order in orders)


def test_cluster_selection() -> None:
    launch = Launch((4, 1, 1), (32, 1, 1), (2, 1, 1))
    data = buffers(512)
    emulate(module(store("%r6")), launch, data, TWO_POINTERS, clusters=[1])
    out = data[1].data
    assert isinstance(out, np.ndarray)
    assert out.view(np.uint32).tolist() == [0] * 64 + list(range(64, 128))
    with pytest.raises(ValueError, match=r"clusters \[2\] are outside the grid of 2 clusters"):
        emulate(module(""), launch, buffers(), TWO_POINTERS, clusters=[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "fair"}, "policy must be one of"),
        ({"parameters": [Pointer("in")]}, "takes 2 parameters; got 1"),
        ({"parameters": [Pointer("in"), Pointer("nowhere")]}, "no buffer is called 'nowhere'"),
        ({"parameters": [Pointer("in"), TensorMap(test_copies.Box((16, 1, 1), (16, 16), (16, 1, 1)), "in")]}, "k_out has 8 bytes"),
        ({"buffers": [*buffers(), Buffer("in", np.zeros(4, np.uint8))]}, "buffer names must differ"),
        ({"kernel": "other"}, "asked for kernel other"),
    ],
)
def test_arguments_are_checked(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"buffers": buffers(), "parameters": TWO_POINTERS} | change
    with pytest.raises(ValueError, match=message):
        emulate(module(""), Launch((1, 1, 1), (32, 1, 1)), **arguments)  # type: ignore[arg-type]


def test_block_must_be_the_required_one() -> None:
    text = module("").replace("\n)\n{", "\n)\n.reqntid 64, 1, 1\n{")
    with pytest.raises(ValueError, match=r"requires blocks of \(64, 1, 1\); the launch has \(32, 1, 1\)"):
        emulate(text, Launch((1, 1, 1), (32, 1, 1)), buffers(), TWO_POINTERS)


def test_launch_and_buffers_are_checked() -> None:
    with pytest.raises(ValueError, match="not a multiple of the cluster"):
        Launch((3, 1, 1), (32, 1, 1), (2, 1, 1))
    with pytest.raises(ValueError, match="sparse buffer can only be an input"):
        Buffer("w", SparseBuffer(16, 16, {}), "output")
    with pytest.raises(ValueError, match="contiguous uint8"):
        Buffer("w", np.zeros((2, 2), np.uint8))
    with pytest.raises(ValueError, match=r"page 0 must be uint8 \[8\]"):
        SparseBuffer(16, 8, {0: np.zeros(4, np.uint8)}).page(0)


def test_addresses_have_no_more_alignment_than_promised() -> None:
    body = "ld.param.b64 %rd9, [k_in]; cvt.u32.u64 %r10, %rd9; cvt.u32.u64 %r11, %rd2; griddepcontrol.wait; st.global.b32 [%rd3], %r10;"
    assert run(body).out[0] % 32 == 16


def test_approximations_can_be_moved_by_ulps() -> None:
    body = "cvt.u64.u32 %rd9, %r4; ld.global.f32 %f1, [%rd4]; ex2.approx.ftz.f32 %r10, %f1;" + store()
    data = np.linspace(-3, 3, 32, dtype=np.float32)
    exact = run(body, data=data).out.astype(np.int64)
    assert (exact == np.exp2(data.astype(np.float64)).astype(np.float32).view(np.uint32)).all()
    moved = {tuple((run(body, data=data, seed=s, arithmetic=Arithmetic(approx_ulps=2)).out - exact).tolist()) for s in range(3)}
    assert len(moved) == 3 and max(max(map(abs, m)) for m in moved) == 2


# ---- reports ----


def test_counts() -> None:
    counts = test_tcgen05.gemm().result.counts
    assert counts.mmas == 4
    assert counts.instructions[0]["tcgen05.mma.cta_group::1.kind::f8f6f4"] == 4
    assert [counts.instructions[w]["tcgen05.ld.sync.aligned.32x32b.x16.b32"] for w in range(4)] == [1] * 4
    assert "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32" not in counts.instructions[0]
    assert counts.bytes["TMA"] == 16384
    assert counts.bytes["global load"] == 2048 and counts.bytes["global store"] == 8192
    text = counts.table({"issuer": (0,), "others": (1, 2, 3)})
    assert text.splitlines()[0].startswith("issuer") and "16384 bytes" in text


def test_counts_of_wgmma_are_per_warp() -> None:
    assert test_wgmma.gemm().result.counts.mmas == 16


def test_timeline_is_a_picture() -> None:
    timeline = test_tcgen05.gemm().result.timelines[0]
    kinds = [e.kind for e in timeline.events]
    assert kinds.count("load") == 1 and kinds.count("mma") == 4 and kinds.count("wait") > 4
    load = next(e for e in timeline.events if e.kind == "load")
    assert all(load.end <= e.end for e in timeline.events if e.kind == "mma"), "the MMAs come after their operand"
    picture = ET.fromstring(timeline.svg())
    bars = [e for e in picture.iter("{http://www.w3.org/2000/svg}rect") if e.find("{http://www.w3.org/2000/svg}title") is not None]
    assert len(bars) == len([k for k in kinds if k != "phase"])
    texts = [e.text for e in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"CTA 0 load", "CTA 0 mma", "CTA 0 warp 3"} <= set(texts)
    with pytest.raises(ValueError, match="no events"):
        timeline.svg([7])
