"""The PTX of every cubin in artifacts/ is the kernel that the spec describes: counts, bytes, offsets and descriptors.

Static: that it computes the right thing is shown on the H200 and by the emulator.
"""

from __future__ import annotations

import functools
import math
from collections import Counter

import pytest

from build_kernels import ARTIFACTS
from emulator import isa
from emulator.decode import OPCODES
from kernels.build.constants import immediate, immediates, literal, shared_offsets
from kernels.build.ptx import Entry, Statement, read_entry
from kernels.build.sources import source_digest
from megamoe_aot.manifest import Manifest
from megamoe_aot.menu import menu_specs
from megamoe_aot.shared_memory import STAGE_BYTES
from megamoe_aot.spec import KernelSpec
from megamoe_aot.tensor_memory import COLUMNS, TensorMemory

FIRST_BOXES = 2


def first_box_count(spec: KernelSpec) -> int:
    """Boxes that the producer asks for before the CTA barrier."""
    return min(FIRST_BOXES, spec.split.unit_blocks)


ALL_CODES = list({spec.code: spec for _, spec in menu_specs()}.values())
CODES = [spec for spec in ALL_CODES if spec.structure == "cluster"]
LIST_CODES = [spec for spec in ALL_CODES if spec.structure == "list"]


@functools.cache
def manifest() -> Manifest:
    built = Manifest.load(ARTIFACTS)
    assert built.source_digest == source_digest(), "artifacts/ is older than the sources: run python build_kernels.py --all"
    return built


@functools.cache
def ptx(spec: KernelSpec) -> Entry:
    """The entry of the PTX from which the cubin of ``spec`` was assembled."""
    sha = next(entry.cubin for entry in manifest().entries if entry.spec.code == spec.code)
    return read_entry((ARTIFACTS / f"{sha}.ptx").read_text())


def enclosing_loops(entry: Entry, site: Statement) -> list[Statement]:
    """Backward branches whose body holds ``site``."""
    return [s for s in entry.find("bra") if s.index > site.index >= entry.labels[s.operands[0]]]


def executions(entry: Entry, site: Statement) -> int:
    """How often ``site`` runs, found by stepping through the loops around it with the registers that are constants.

    Registers that depend on anything else are unknown; a branch on an unknown is a spin loop's way out and is taken.
    """
    loops = enclosing_loops(entry, site)
    if not loops:
        return 1
    start = min(entry.labels[s.operands[0]] for s in loops)
    end = max(s.index for s in loops)
    known: dict[str, int] = {}
    for s in entry.statements[:start]:  # values at the loop's entry: its preheader is straight-line code
        step(known, s)
    count, index = 0, start
    for _ in range(200_000):
        s = entry.statements[index]
        count += s is site
        index += 1
        if s.matches("bra"):
            if taken(known, s):
                index = entry.labels[s.operands[0]]
            elif s.index == end:
                return count
        else:
            step(known, s)
        if not start <= index <= end:
            return count
    raise AssertionError(f"{site}: its loops do not end")


def taken(known: dict[str, int], branch: Statement) -> bool:
    if branch.guard is None:
        return True
    value = known.get(branch.guard.lstrip("!"))
    return value is None or bool(value) != branch.guard.startswith("!")


def step(known: dict[str, int], s: Statement) -> None:
    """Track mov, not, add, selp and setp on constants; anything else makes its result unknown."""
    known_sources = [known.get(o) if o.startswith("%") else literal(o) for o in s.sources]
    values = [value for value in known_sources[:2] if value is not None]
    result = None
    if len(values) == len(known_sources[:2]):
        if s.matches("mov"):
            result = values[0]
        elif s.matches("not.pred"):
            result = int(not values[0])
        elif s.matches("selp") and s.operands[3] in known:
            result = values[0] if known[s.operands[3]] else values[1]
        elif s.matches("add"):
            result = (values[0] + values[1]) % 2**32
        elif s.matches("setp.eq") or s.matches("setp.ne"):
            result = int((values[0] % 2**32 == values[1] % 2**32) == s.matches("setp.eq"))
    for register in s.written:
        if result is None or s.guard is not None:
            known.pop(register, None)
        else:
            known[register] = result


@pytest.fixture(params=CODES, ids=lambda spec: spec.code_name)
def spec(request: pytest.FixtureRequest) -> KernelSpec:
    result: KernelSpec = request.param
    return result


def test_every_mbarrier_is_initialised_once_with_its_count(spec: KernelSpec) -> None:
    wanted = {
        spec.shared.barriers[name] + 8 * i: arrivals
        for name, (number, arrivals) in spec.shared.barrier_counts.items()
        for i in range(number)
    }
    found = Counter[tuple[int, int]]()
    for init in ptx(spec).find("mbarrier.init"):
        offsets = shared_offsets(ptx(spec), init.operands[0])
        count = immediate(ptx(spec), init.operands[1])
        assert offsets is not None and len(offsets) == 1 and count is not None
        found[(next(iter(offsets)), count)] += 1
    assert found == Counter(wanted.items())


def test_expected_bytes(spec: KernelSpec) -> None:
    """The sums barrier is armed once with what the whole cluster sends; each load with the bytes of its box."""
    split, entry = spec.split, ptx(spec)
    loads = len(entry.find("cp.async.bulk.tensor"))
    armed = Counter(immediate(entry, s.operands[2]) for s in entry.find("mbarrier.arrive", "expect_tx"))
    wanted = Counter({split.parts * split.tiles1 * 512: 1})
    wanted.update([STAGE_BYTES] * (loads - 1) + [split.tile2_rows * 128])
    assert armed == wanted


def test_weight_stream(spec: KernelSpec) -> None:
    """Every stage of the work split is loaded once: GEMM1's by the first boxes and a loop, GEMM2's by the last site's loop."""
    entry = ptx(spec)
    loads = entry.find("cp.async.bulk.tensor", "3d")
    runs = [executions(entry, s) for s in loads]
    begun = first_box_count(spec)
    assert set(runs[:begun]) == {1} and len(runs) == begun + 2 + (spec.split.units > 1)
    assert (sum(runs[:-1]), runs[-1]) == (spec.split.stages1, spec.split.stages2)
    assert all("L2::cache_hint" in s.parts for s in loads)
    assert len(entry.find("cp")) == len(loads), "no other bulk copies"


def test_exchange(spec: KernelSpec) -> None:
    """32 lanes x 16 bytes x cluster/4 stores = a warp's 128 bytes to every CTA, once per unit."""
    entry = ptx(spec)
    sends = entry.find("st.async")
    assert len(sends) == spec.cluster // 4
    assert {executions(entry, s) for s in sends} == {spec.split.units}
    sent_per_cta = 4 * sum(32 * 16 * executions(entry, s) for s in sends)
    assert sent_per_cta == spec.split.units * 512 * spec.cluster
    assert all(s.matches("st.async", "shared::cluster", "v4") for s in sends)


def test_synchronisation(spec: KernelSpec) -> None:
    entry = ptx(spec)
    roles = 2 if spec.engine == "hopper" else 3
    assert len(entry.find("barrier.cluster.arrive", "relaxed")) == len(entry.find("barrier.cluster.arrive")) == roles
    assert len(entry.find("barrier.cluster.wait", "acquire")) == roles
    assert len(entry.find("fence.mbarrier_init")) == 2, "the producer's full barriers, another warp's others"
    assert len(entry.find("griddepcontrol.wait")) == 2, "producer and consumers; the MMA warp touches no global memory"
    assert not entry.find("griddepcontrol.launch_dependents")
    assert len(entry.find("fence.proxy.async")) >= 2, "token rows and hidden rows; the compiler may duplicate a path"
    assert len([s for s in entry.find("mbarrier.try_wait") if "cluster" in s.parts]) == 1, "only the sums come from other CTAs"
    assert entry.block == (spec.block_threads, 1, 1) and entry.min_ctas == 2 and entry.shared_align == 1024


@pytest.mark.parametrize("spec", [s for s in CODES if s.engine == "blackwell"], ids=lambda s: s.code_name)
def test_tcgen05(spec: KernelSpec) -> None:
    """Four k32 steps per stage; accumulators, instruction descriptors and operand descriptors as the maps say."""
    entry, split, memory = ptx(spec), spec.split, TensorMemory.of(spec.split)
    mmas = entry.find("tcgen05.mma", "kind::f8f6f4", "cta_group::1")
    assert len(mmas) == len(entry.find("tcgen05.mma")) == 8
    assert [executions(entry, s) for s in mmas] == [split.stages1] * 4 + [split.stages2] * 4
    rows = [128] * 4 + [split.tile2_rows] * 4
    expected = [(1 << 4) | (COLUMNS // 8 << 17) | (r // 16 << 24) for r in rows]  # FP32 += E4M3 x E4M3, K-major
    assert [immediate(entry, s.operands[3]) for s in mmas] == expected

    columns = [immediate(entry, s.operands[-1]) for s in entry.find("tcgen05.alloc") + entry.find("tcgen05.dealloc")]
    assert columns == [memory.allocated] * 2
    reads = entry.find("tcgen05.ld", "32x32b", "x16")
    groups = [math.ceil(split.unit_blocks / COLUMNS), math.ceil(split.blocks2 / COLUMNS)]
    assert len(reads) == sum(groups) == len(entry.find("tcgen05.ld"))
    assert sum(executions(entry, s) for s in reads) == groups[0] * split.units + groups[1] * split.tiles2
    commits = Counter(executions(entry, s) for s in entry.find("tcgen05.commit"))
    assert commits == Counter([split.stages1, split.units, split.stages2, split.tiles2])

    # Swizzle 128B (2 at bit 61), version 1 at bit 46, leading offset 1 at bit 16; A's stride 1024 is constant, B's is not.
    fixed = (2 << 61) | (1 << 46) | (1 << 16)
    words = {w % 2**64 for s in entry.find("or.b64") for w in immediates(entry, s.operands[2]) or ()}
    assert words == {fixed, fixed | (1024 >> 4 << 32)}


@pytest.mark.parametrize("spec", [s for s in CODES if s.engine == "hopper"], ids=lambda s: s.code_name)
def test_wgmma(spec: KernelSpec) -> None:
    """Four k32 steps per 64-row half; GEMM1's groups of eight columns are separate loops."""
    entry, split = ptx(spec), spec.split
    mmas = entry.find("wgmma.mma_async", "m64n8k32", "e4m3")
    assert len(mmas) == len(entry.find("wgmma.mma_async"))
    assert sum(executions(entry, s) for s in mmas) == 4 * (2 * split.stages1 + split.tile2_rows // 64 * split.stages2)
    assert len(entry.find("wgmma.fence")) == len(entry.find("wgmma.commit_group")) == len(entry.find("wgmma.wait_group"))
    fixed = (1 << 62) | (1024 >> 4 << 32) | (1 << 16)
    words = {w % 2**64 for s in entry.find("or.b64") for w in immediates(entry, s.operands[2]) or ()}
    assert words == {fixed}


# ---------------------------------------------------------------------------------------------------------- List structure


@pytest.fixture(params=LIST_CODES, ids=lambda spec: spec.code_name)
def work_list(request: pytest.FixtureRequest) -> KernelSpec:
    result: KernelSpec = request.param
    return result


def test_list_launch(work_list: KernelSpec) -> None:
    """One CTA per SM, no clusters, one ticket and those of the pool; dependents start early only behind the launch's flag."""
    entry = ptx(work_list)
    assert entry.block == (work_list.block_threads, 1, 1) and entry.min_ctas == 1 and entry.shared_align == 1024
    assert not entry.find("barrier.cluster") + entry.find("st.async") + entry.find("mapa")
    tickets, pool = (entry.find("atom", "relaxed", "gpu", "global", "add", kind) for kind in ("u64", "u32"))
    assert len(tickets) == 1 and len(pool) >= 1 and len(entry.find("atom")) == len(tickets) + len(pool)
    triggers = entry.find("griddepcontrol.launch_dependents")
    assert len(triggers) == 1
    assert len(entry.find("griddepcontrol.wait")) == 2, "the producer, and all others that touch global memory"


def test_list_weight_stream(work_list: KernelSpec) -> None:
    """Boxes: the first stages, the rest of the first deal, the other deals, the tiles. With each unit its block scales."""
    entry, plan = ptx(work_list), work_list.work_list
    boxes = entry.find("cp.async.bulk.tensor", "3d")
    assert all("L2::cache_hint" in s.parts for s in boxes)
    per_stage1 = 1 if work_list.layout == "trtllm_gen" else 2
    per_stage2 = 1 if work_list.layout == "trtllm_gen" and plan.blocks2 % 2 == 0 else 2
    assert len(boxes) == (FIRST_BOXES + 2) * per_stage1 + per_stage2 + plan.blocks2 % 2
    scales = [s for s in entry.find("cp.async.bulk") if "tensor" not in s.parts]
    assert {immediate(entry, s.operands[2]) for s in scales} >= {4 * plan.unit_blocks}
    assert all(size is not None and size % 16 == 0 for size in (immediate(entry, s.operands[2]) for s in scales))


def test_list_mmas(work_list: KernelSpec) -> None:
    """64 rows x 8 or 16 tokens, four k32 steps per K block; two K blocks per stage and a last single one where their number is odd.

    On Hopper W1's loop has one stage, and so has W2's, but for tiles of up to three stages, whose loop is unrolled.
    """
    entry, plan = ptx(work_list), work_list.work_list
    if work_list.engine == "hopper":
        mmas = entry.find("wgmma.mma_async", f"m64n{plan.columns}k32", "e4m3")
        of_tile = 4 * plan.blocks2 if plan.blocks2 <= 6 else 8 + 4 * (plan.blocks2 % 2)
        assert len(mmas) == len(entry.find("wgmma.mma_async")) == 8 + of_tile
        in_registers = sum(s.operands[1].startswith("{") for s in mmas)
        assert in_registers == len(entry.find("ldmatrix")) == (4 * plan.blocks2 if plan.held else 0)
    else:
        mmas = entry.find("tcgen05.mma", "kind::f8f6f4", "cta_group::1")
        assert len(mmas) == len(entry.find("tcgen05.mma")) and len(mmas) % 4 == 0 and mmas
        described = {immediate(entry, s.operands[3]) for s in mmas}
        assert described == {(1 << 4) | (plan.columns // 8 << 17) | (64 // 16 << 24)}


@pytest.mark.parametrize("spec", ALL_CODES, ids=lambda spec: spec.code_name)
def test_the_emulator_has_every_instruction(spec: KernelSpec) -> None:
    """A new one would show only where somebody runs that entry."""
    assert isa.__all__, "its modules fill the table"
    assert {s.opcode for s in ptx(spec).statements} <= OPCODES.keys()
