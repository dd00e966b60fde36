"""Expert weights: checkpoint tensors <-> the two layouts that the kernels read. Pure functions of torch tensors, on any device.

``row_major``: w13 [E, 2I, H] and w2 [E, H, I], rows in logical order; which half of w13 comes first is always said (``w13_order``).

``trtllm_gen``: w13 [E, H/128, 2I, 128] and w2 [E, I/128, H, 128]: blocks of 128 K bytes before the rows, the up rows first, and every
16 rows shuffled: logical row o stands at physical row 8 * (o % 2) + o // 2. Seen as [2 parities, 8] that is a transposition, so
packing and unpacking are strided copies.

Scales are FP32 and the same in both layouts: [E, 2I/128, H/128] with the halves in w13's order, and [E, H/128, I/128].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
LAYOUTS = ("trtllm_gen", "row_major")
W13_ORDERS = ("up_gate", "gate_up")


class ExpertTensors(NamedTuple):
    """One expert as in a checkpoint: gate and up FP8 [I, H], down FP8 [H, I], scales FP32 [ceil(rows/128), ceil(columns/128)]."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_scale: Tensor
    up_scale: Tensor
    down_scale: Tensor


class Packed(NamedTuple):
    """What a kernel binds, experts first; see the module's docstring for shapes."""

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor


def physical_row(row: int) -> int:
    """Where trtllm_gen puts logical row ``row``."""
    return row - row % 16 + 8 * (row % 2) + row % 16 // 2


def logical_row(row: int) -> int:
    """Inverse of :func:`physical_row`."""
    return row - row % 16 + 2 * (row % 8) + row % 16 // 8


# ---------------------------------------------------------------------------------------------------------------------- Checks


def check_expert(expert: ExpertTensors) -> None:
    """Dtypes and shapes of one expert; TypeError or ValueError says what to convert."""
    for name in ("gate", "up", "down"):
        weight, scale = getattr(expert, name), getattr(expert, f"{name}_scale")
        if weight.dtype not in (torch.float8_e4m3fn, torch.uint8):
            raise TypeError(f"{name} must be torch.float8_e4m3fn, or uint8 holding its bits; got {weight.dtype}")
        check_scale_dtype(f"{name}_scale", scale)
        rows, columns = weight.shape
        if scale.shape != (-(-rows // BLOCK), -(-columns // BLOCK)):
            raise ValueError(
                f"{name} is {[rows, columns]}, so {name}_scale must be {[-(-rows // BLOCK), -(-columns // BLOCK)]}; got {list(scale.shape)}"
            )
    inter, hidden = expert.gate.shape
    if expert.up.shape != (inter, hidden) or expert.down.shape != (hidden, inter):
        raise ValueError(
            f"gate is {[inter, hidden]}, so up must be the same and down {[hidden, inter]}; "
            f"got {list(expert.up.shape)} and {list(expert.down.shape)}"
        )


def check_scale_dtype(name: str, scale: Tensor) -> None:
    """Scales must be FP32: UE8M0 bytes read as FP32 would be silent garbage."""
    if scale.dtype == torch.float32:
        return
    hint = {
        torch.uint8: "these look like UE8M0 exponents: convert with scales_from_ue8m0()",
        torch.float8_e8m0fnu: "convert with scales_from_ue8m0()",
        torch.int32: "these look like packed UE8M0 exponents: unpack them to uint8 [rows/128, columns/128], then scales_from_ue8m0()",
    }.get(scale.dtype, "convert with .float() if that is exact")
    raise TypeError(f"{name} must be FP32; got {scale.dtype}: {hint}")


def scales_from_ue8m0(exponents: Tensor) -> Tensor:
    """UE8M0 (uint8 or torch.float8_e8m0fnu) -> FP32 2**(byte - 127), exact; byte 255 is NaN."""
    if exponents.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise TypeError(f"UE8M0 scales are uint8 or torch.float8_e8m0fnu; got {exponents.dtype}")
    bits = exponents.view(torch.uint8).int()
    powers = (bits << 23).view(torch.float32)
    powers = torch.where(bits == 0, 2.0**-127, powers)
    return torch.where(bits == 255, torch.nan, powers)


def _check_order(layout: str, w13_order: str) -> None:
    if layout not in LAYOUTS or w13_order not in W13_ORDERS:
        raise ValueError(f"layout must be one of {LAYOUTS} and w13_order one of {W13_ORDERS}; got {layout!r}, {w13_order!r}")
    if layout == "trtllm_gen" and w13_order != "up_gate":
        raise ValueError("trtllm_gen puts the up rows first: w13_order must be 'up_gate'")


def _bits(weight: Tensor) -> Tensor:
    return weight.view(torch.uint8)


# ------------------------------------------------------------------------------------------------------------- Tensor parallel


def slice_rank(expert: ExpertTensors, rank: int, ranks: int) -> ExpertTensors:
    """What rank ``rank`` of ``ranks`` holds (views): rows [r*I, (r+1)*I) of gate and up, the same columns of down.

    ValueError where the per-rank I is no multiple of 128; the message names the padded size for :func:`pad_inter`.
    """
    check_expert(expert)
    full = expert.gate.shape[0]
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be 0 to {ranks - 1}; got {rank}")
    if full % (ranks * BLOCK):
        inter = -(-full // (ranks * BLOCK)) * BLOCK
        raise ValueError(
            f"{full} intermediate channels over {ranks} ranks are {full / ranks:g} per rank, no multiple of {BLOCK}: "
            f"zero-pad first, pad_inter(expert, {inter * ranks}) gives {inter} per rank"
        )
    inter = full // ranks
    rows, blocks = slice(rank * inter, (rank + 1) * inter), slice(rank * inter // BLOCK, (rank + 1) * inter // BLOCK)
    return ExpertTensors(
        gate=expert.gate[rows],
        up=expert.up[rows],
        down=expert.down[:, rows],
        gate_scale=expert.gate_scale[blocks],
        up_scale=expert.up_scale[blocks],
        down_scale=expert.down_scale[:, blocks],
    )


def pad_inter(expert: ExpertTensors, inter: int) -> ExpertTensors:
    """Copies with ``inter`` intermediate channels: zero weights and scales of 1 behind the real ones. Outputs do not change."""
    check_expert(expert)
    more = inter - expert.gate.shape[0]
    blocks = -(-inter // BLOCK) - expert.gate_scale.shape[0]
    if more < 0:
        raise ValueError(f"the expert has {expert.gate.shape[0]} intermediate channels already; asked for {inter}")

    def pad(tensor: Tensor, amount: tuple[int, int, int, int], value: float) -> Tensor:
        kept = _bits(tensor) if tensor.element_size() == 1 else tensor
        return torch.nn.functional.pad(kept, amount, value=value).view(tensor.dtype)

    return ExpertTensors(
        gate=pad(expert.gate, (0, 0, 0, more), 0),
        up=pad(expert.up, (0, 0, 0, more), 0),
        down=pad(expert.down, (0, more, 0, 0), 0),
        gate_scale=pad(expert.gate_scale, (0, 0, 0, blocks), 1),
        up_scale=pad(expert.up_scale, (0, 0, 0, blocks), 1),
        down_scale=pad(expert.down_scale, (0, blocks, 0, 0), 1),
    )


# --------------------------------------------------------------------------------------------------------------------- Packing


def allocate(experts: int, hidden: int, inter: int, *, layout: str, device: torch.device | str = "cpu") -> Packed:
    """Uninitialised tensors (weights torch.float8_e4m3fn) for :func:`pack_expert`."""
    if hidden % BLOCK or inter % BLOCK:
        raise ValueError(f"hidden and inter must be multiples of {BLOCK}; got {hidden} and {inter}: zero-pad inter with pad_inter()")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}; got {layout!r}")
    block_k = layout == "trtllm_gen"
    w13 = (experts, hidden // BLOCK, 2 * inter, BLOCK) if block_k else (experts, 2 * inter, hidden)
    w2 = (experts, inter // BLOCK, hidden, BLOCK) if block_k else (experts, hidden, inter)
    return Packed(
        torch.empty(w13, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
        torch.empty(experts, 2 * inter // BLOCK, hidden // BLOCK, device=device),
        torch.empty(w2, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
        torch.empty(experts, hidden // BLOCK, inter // BLOCK, device=device),
    )


def pack_expert(packed: Packed, index: int, expert: ExpertTensors, *, layout: str, w13_order: str) -> None:
    """Write one expert (a rank's slice) into place; the other experts and all data pointers stay."""
    check_expert(expert)
    _check_order(layout, w13_order)
    inter, hidden = packed.w2_scale.shape[2] * BLOCK, packed.w2_scale.shape[1] * BLOCK
    if expert.gate.shape != (inter, hidden):
        raise ValueError(f"packed holds experts of I={inter}, H={hidden}; got gate {list(expert.gate.shape)}")
    for slot, source in zip(_slots(packed, index, layout, w13_order), expert, strict=True):
        source = _bits(source) if slot.dtype == torch.uint8 else source
        slot.copy_(source if source.dim() == slot.dim() else _split(source))


def pack(
    experts: Iterable[ExpertTensors],
    count: int,
    *,
    layout: str,
    w13_order: str,
    device: torch.device | str = "cpu",
    out: Packed | None = None,
) -> Packed:
    """Stream ``count`` experts, one at a time, into new tensors on ``device`` or into ``out``. Inverse: :func:`unpack_expert`."""
    packed = 0
    for expert in experts:
        if out is None:
            out = allocate(count, expert.gate.shape[1], expert.gate.shape[0], layout=layout, device=device)
        if packed == count:
            raise ValueError(f"expected {count} experts, got more")
        pack_expert(out, packed, expert, layout=layout, w13_order=w13_order)
        packed += 1
    if out is None or packed != count:
        raise ValueError(f"expected {count} experts, got {packed}")
    return out


def unpack_expert(packed: Packed, index: int, *, layout: str, w13_order: str) -> ExpertTensors:
    """Copies of one expert's tensors: the exact inverse of :func:`pack_expert`."""
    _check_order(layout, w13_order)
    gate, up, down, *scales = _slots(packed, index, layout, w13_order)
    hidden, inter = packed.w2_scale.shape[1] * BLOCK, packed.w2_scale.shape[2] * BLOCK

    def copy(slot: Tensor, columns: int) -> Tensor:
        return slot.clone(memory_format=torch.contiguous_format).view(-1, columns).view(packed.w13.dtype)

    return ExpertTensors(copy(gate, hidden), copy(up, hidden), copy(down, inter), *(scale.clone() for scale in scales))


def to_logical(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, *, layout: str, w13_order: str) -> Packed:
    """Packed tensors, of all experts or of one (no leading E), as row_major with the up rows first. Views where nothing must move."""
    _check_order(layout, w13_order)
    dtype = w13.dtype
    w13, w2 = _bits(w13), _bits(w2)
    if layout == "trtllm_gen":
        w13, w2 = (_logical(w).flatten(-2).flatten(-4, -2) for w in (w13, w2))
    if w13_order == "gate_up":
        w13, w13_scale = (torch.cat(tensor.chunk(2, -2)[::-1], -2) for tensor in (w13, w13_scale))
    return Packed(w13.view(dtype), w13_scale, w2.view(dtype), w2_scale)


def _logical(weight: Tensor) -> Tensor:
    """View of trtllm_gen bytes [..., K/128, rows, 128] with logical row order: [..., rows/16, 8, 2, K/128, 128]."""
    return weight.view(*weight.shape[:-2], -1, 2, 8, BLOCK).movedim((-5, -4, -2), (-2, -5, -4))


def _split(weight: Tensor) -> Tensor:
    """View of logical [rows, K] as [rows/16, 8, 2, K/128, 128]."""
    rows, columns = weight.shape
    return weight.view(rows // 16, 8, 2, columns // BLOCK, BLOCK)


def _slots(packed: Packed, index: int, layout: str, w13_order: str) -> ExpertTensors:
    """Views of one expert's place: weights as uint8, in logical order."""
    w13, w2 = _bits(packed.w13[index]), _bits(packed.w2[index])
    if layout == "trtllm_gen":
        w13, w2 = _logical(w13), _logical(w2)
    first, second = w13.chunk(2)
    first_scale, second_scale = packed.w13_scale[index].chunk(2)
    if w13_order == "up_gate":
        first, second, first_scale, second_scale = second, first, second_scale, first_scale
    return ExpertTensors(first, second, w2, first_scale, second_scale, packed.w2_scale[index])
