"""Packing against index-by-index formulas, exact round trips, and the errors that protect a caller."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megamoe_aot import weights as W
from tests.data import Problem

SMALL = Problem(hidden=384, inter=256, experts=3, top_k=1, tokens=1)
FORMATS = [("trtllm_gen", "up_gate"), ("row_major", "up_gate"), ("row_major", "gate_up")]
formats = pytest.mark.parametrize("layout,w13_order", FORMATS)


def raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(x.dtype == y.dtype and torch.equal(raw(x), raw(y)) for x, y in zip(a, b, strict=True))


def random_expert(inter: int, hidden: int, seed: int) -> W.ExpertTensors:
    """Any bytes, NaN codes too, and scales that repeat nowhere."""
    generator = torch.Generator().manual_seed(seed)

    def fp8(rows: int, columns: int) -> Tensor:
        return torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)

    def scale(rows: int, columns: int) -> Tensor:
        return torch.rand(-(-rows // 128), -(-columns // 128), generator=generator)

    shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
    return W.ExpertTensors(*(fp8(*s) for s in shapes), *(scale(*s) for s in shapes))


# --------------------------------------------------------------------------------------------------------------------- Layouts


def test_row_shuffle_table() -> None:
    table = (0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15)
    assert tuple(W.physical_row(o) for o in range(16)) == table
    for row in range(256):
        assert W.physical_row(row) == row // 16 * 16 + table[row % 16]
        assert W.logical_row(W.physical_row(row)) == row


@formats
def test_packed_bytes(layout: str, w13_order: str) -> None:
    """Every row of every matrix stands where the layout's description puts it."""
    packed = SMALL.packed(layout=layout, w13_order=w13_order)
    table = (0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15)
    for index in range(3):
        e = SMALL.expert(index)
        first, second = (e.up, e.gate) if w13_order == "up_gate" else (e.gate, e.up)
        for got, halves in ((packed.w13[index], (first, second)), (packed.w2[index], (e.down,))):
            logical = torch.cat([raw(half) for half in halves])
            for row, values in enumerate(logical):
                if layout == "row_major":
                    assert torch.equal(raw(got)[row], values)
                else:
                    at = row // 16 * 16 + table[row % 16]
                    for k in range(len(values) // 128):
                        assert torch.equal(raw(got)[k, at], values[128 * k : 128 * k + 128])
        scales = (e.up_scale, e.gate_scale) if w13_order == "up_gate" else (e.gate_scale, e.up_scale)
        assert torch.equal(packed.w13_scale[index], torch.cat(scales))
        assert torch.equal(packed.w2_scale[index], e.down_scale)


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from(FORMATS), st.integers(0, 2**31))
@settings(max_examples=40)
def test_round_trip(inter: int, hidden: int, form: tuple[str, str], seed: int) -> None:
    layout, w13_order = form
    experts = [random_expert(128 * inter, 128 * hidden, seed + e) for e in range(2)]
    packed = W.pack(iter(experts), 2, layout=layout, w13_order=w13_order)
    for index, expert in enumerate(experts):
        back = W.unpack_expert(packed, index, layout=layout, w13_order=w13_order)
        assert same(back, expert)
        assert all(tensor.is_contiguous() for tensor in back)
        assert back.gate.untyped_storage().data_ptr() != packed.w13.untyped_storage().data_ptr()
    again = W.pack(
        (W.unpack_expert(packed, i, layout=layout, w13_order=w13_order) for i in range(2)), 2, layout=layout, w13_order=w13_order
    )
    assert same(again, packed)


@formats
def test_to_logical(layout: str, w13_order: str) -> None:
    packed = SMALL.packed(layout=layout, w13_order=w13_order)
    want = SMALL.packed(layout="row_major", w13_order="up_gate")
    assert same(W.to_logical(*packed, layout=layout, w13_order=w13_order), want)
    one = W.to_logical(*(tensor[1] for tensor in packed), layout=layout, w13_order=w13_order)
    assert same(one, tuple(tensor[1] for tensor in want))
    if (layout, w13_order) == ("row_major", "up_gate"):
        logical = W.to_logical(*packed, layout=layout, w13_order=w13_order)
        assert [t.data_ptr() for t in logical] == [t.data_ptr() for t in packed]


@formats
def test_one_expert_is_replaced_in_place(layout: str, w13_order: str) -> None:
    packed = SMALL.packed(layout=layout, w13_order=w13_order)
    pointers, new = [t.data_ptr() for t in packed], random_expert(256, 384, 1)
    W.pack_expert(packed, 1, new, layout=layout, w13_order=w13_order)
    assert [t.data_ptr() for t in packed] == pointers
    back = [W.unpack_expert(packed, i, layout=layout, w13_order=w13_order) for i in range(3)]
    assert same(back[0], SMALL.expert(0)) and same(back[1], new) and same(back[2], SMALL.expert(2))


def test_uint8_weights_pack_like_float8() -> None:
    expert = random_expert(128, 128, 3)
    as_bytes = W.ExpertTensors(*(raw(t) for t in expert))
    packed = [W.pack([e], 1, layout="trtllm_gen", w13_order="up_gate") for e in (expert, as_bytes)]
    assert same(packed[0], packed[1])


def test_streaming_takes_one_expert_at_a_time() -> None:
    alive: list[int] = []

    def stream() -> Iterator[W.ExpertTensors]:
        for e in range(3):
            alive.append(e)
            yield SMALL.expert(e)

    out = W.allocate(3, 384, 256, layout="row_major")
    packed = W.pack(stream(), 3, layout="row_major", w13_order="gate_up", out=out)
    assert packed is out and alive == [0, 1, 2]
    with pytest.raises(ValueError, match="expected 4 experts, got 3"):
        W.pack(stream(), 4, layout="row_major", w13_order="gate_up")
    with pytest.raises(ValueError, match="expected 2 experts, got more"):
        W.pack(stream(), 2, layout="row_major", w13_order="gate_up")


# ------------------------------------------------------------------------------------------------------------- Tensor parallel


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rank_slices(ranks: int) -> None:
    full = random_expert(512, 256, 4)
    inter = 512 // ranks
    for rank in range(ranks):
        part = W.slice_rank(full, rank, ranks)
        for i in range(inter):
            assert torch.equal(raw(part.gate)[i], raw(full.gate)[rank * inter + i])
            assert torch.equal(raw(part.up)[i], raw(full.up)[rank * inter + i])
            assert torch.equal(raw(part.down)[:, i], raw(full.down)[:, rank * inter + i])
            assert torch.equal(part.gate_scale[i // 128], full.gate_scale[(rank * inter + i) // 128])
            assert torch.equal(part.up_scale[i // 128], full.up_scale[(rank * inter + i) // 128])
            assert torch.equal(part.down_scale[:, i // 128], full.down_scale[:, (rank * inter + i) // 128])
        packed = W.pack([part], 1, layout="trtllm_gen", w13_order="up_gate")
        assert same(W.unpack_expert(packed, 0, layout="trtllm_gen", w13_order="up_gate"), part)


def test_rank_size_must_be_whole_blocks() -> None:
    """MiniMax-M2 at TP8: 1536 / 8 = 192."""
    expert = random_expert(1536, 128, 5)
    with pytest.raises(ValueError, match=r"192 per rank.*pad_inter\(expert, 2048\) gives 256 per rank"):
        W.slice_rank(expert, 0, 8)
    assert W.slice_rank(W.pad_inter(expert, 2048), 7, 8).gate.shape == (256, 128)
    with pytest.raises(ValueError, match="rank must be 0 to 3"):
        W.slice_rank(expert, 4, 4)


@pytest.mark.parametrize("inter,padded", [(192, 256), (256, 256), (130, 512)])
def test_padding_keeps_the_dequantised_weights(inter: int, padded: int) -> None:
    """Also with a last scale block that is only partly filled."""
    expert = random_expert(inter, 128, 6)
    got = W.pad_inter(expert, padded)
    W.check_expert(got)
    for name, axis in (("gate", 0), ("up", 0), ("down", 1)):
        new, old = raw(getattr(got, name)), raw(getattr(expert, name))
        assert torch.equal(new.narrow(axis, 0, inter), old) and not new.narrow(axis, inter, padded - inter).any()
        blocks = -(-inter // 128)
        new_scale, old_scale = getattr(got, f"{name}_scale"), getattr(expert, f"{name}_scale")
        assert torch.equal(new_scale.narrow(axis, 0, blocks), old_scale) and new_scale.isfinite().all()
    with pytest.raises(ValueError, match=f"{inter} intermediate channels already"):
        W.pad_inter(expert, 128)


# ---------------------------------------------------------------------------------------------------------------------- Errors


@pytest.mark.parametrize(
    "dtype,hint",
    [
        (torch.uint8, r"scales_from_ue8m0\(\)"),
        (torch.float8_e8m0fnu, r"scales_from_ue8m0\(\)"),
        (torch.int32, "unpack them to uint8"),
        (torch.bfloat16, r"\.float\(\)"),
    ],
)
def test_scales_must_be_fp32(dtype: torch.dtype, hint: str) -> None:
    expert = random_expert(128, 128, 7)
    wrong = expert._replace(up_scale=torch.ones(1, 1, dtype=torch.uint8).to(dtype))
    with pytest.raises(TypeError, match=f"up_scale must be FP32.*{hint}"):
        W.pack([wrong], 1, layout="row_major", w13_order="gate_up")


def test_ue8m0_conversion() -> None:
    exponents = torch.tensor([0, 1, 126, 127, 128, 254, 255], dtype=torch.uint8)
    want = [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]
    for given_as in (exponents, exponents.view(torch.float8_e8m0fnu)):
        got = W.scales_from_ue8m0(given_as)
        assert got.dtype == torch.float32 and got[:6].tolist() == want and math.isnan(got[6])
    with pytest.raises(TypeError, match="UE8M0"):
        W.scales_from_ue8m0(torch.ones(1))


def test_wrong_experts_are_refused() -> None:
    good = random_expert(256, 128, 8)
    packed = W.allocate(1, 128, 256, layout="row_major")

    def refused(expert: W.ExpertTensors, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            W.pack_expert(packed, 0, expert, layout="row_major", w13_order="up_gate")

    refused(good._replace(gate=good.gate.float()), TypeError, "gate must be torch.float8_e4m3fn")
    refused(good._replace(gate_scale=good.gate_scale.T.contiguous()), ValueError, r"gate_scale must be \[2, 1\]; got \[1, 2\]")
    refused(good._replace(down=good.gate, down_scale=good.gate_scale), ValueError, r"down \[128, 256\]")
    refused(random_expert(128, 128, 9), ValueError, "I=256, H=128; got gate")
    with pytest.raises(ValueError, match=r"multiples of 128.*pad_inter"):
        W.allocate(1, 128, 192, layout="row_major")


def test_layout_and_order_are_explicit() -> None:
    with pytest.raises(ValueError, match="trtllm_gen puts the up rows first"):
        SMALL.packed(layout="trtllm_gen", w13_order="gate_up")
    with pytest.raises(ValueError, match="layout must be one of"):
        W.allocate(1, 128, 128, layout="blockmajor")
    with pytest.raises(ValueError, match="w13_order one of"):
        SMALL.packed(layout="row_major", w13_order="w13")
    with pytest.raises(TypeError):
        W.pack([], 0, layout="row_major")  # type: ignore[call-arg]


# ------------------------------------------------------------------------------------------------------------------- Test data


def test_test_data_make_mistakes_visible() -> None:
    problem = Problem(hidden=1024, inter=256, experts=32, top_k=4, tokens=1)
    experts = [problem.expert(e) for e in range(32)]
    scales = torch.cat([s.flatten() for e in experts for s in e[3:]])
    assert len(scales.unique()) == len(scales)
    for kind in ("gate_scale", "up_scale", "down_scale"):
        of_kind = torch.cat([getattr(e, kind).flatten() for e in experts])
        assert of_kind.max() / of_kind.min() >= 100
        assert (of_kind.log2() % 1 == 0).sum() == 0
    gate, up, down = (torch.stack([getattr(e, kind).float() for e in experts]) for kind in ("gate", "up", "down"))
    for values, mean, spread in ((gate, 8.0, 96.0), (up, -4.0, 64.0), (down, 0.0, 80.0)):
        assert float(values.mean()) == pytest.approx(mean, abs=0.5) and float(values.std()) == pytest.approx(spread, rel=0.02)
    flat = gate.flatten()
    assert abs(float(torch.corrcoef(torch.stack((flat[:-1], flat[1:])))[0, 1])) < 0.01
    assert abs(float(torch.corrcoef(torch.stack((gate[0].flatten(), gate[1].flatten())))[0, 1])) < 0.01
    bias = problem.bias()
    assert bias is not None and (bias > 0).any() and (bias < 0).any() and (bias != 0).all()
    assert torch.equal(problem.replace(tokens=3).x()[:1], problem.x())
    assert torch.equal(problem.replace(tokens=3).logits()[:1], problem.logits())
    assert not same(problem.replace(seed=1).expert(0), experts[0])
