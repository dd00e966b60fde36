"""What a tensor map means: boxes that the GPU's TMA loads through the driver's own CUtensorMap, against the emulator's TMA.

    python -m verification.tensor_maps [--out FILE] [--commit HASH]

Run it from the repository root on a Hopper or Blackwell GPU. For every distinct description that the menu's entries bind, at its full
size, the driver encodes the map (``megamoe_aot.tensor_map.encode``) over a tensor of random bytes, the kernel of ``tma_dump.ptx``
loads boxes at the corners, at random places and beyond every edge, and dumps shared memory as TMA left it. The emulator runs the same
PTX on the same description. Both images must be equal byte for byte.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import emulator
from benchmarks import environment, report
from emulator import Buffer, Launch, Pointer, SparseBuffer, TensorMap
from megamoe_aot import driver
from megamoe_aot.manifest import Manifest
from megamoe_aot.spec import KernelSpec
from megamoe_aot.tensor_map import TensorMapSpec, encode, w2_map, w13_map

OUT = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "tensor_maps.json"
PTX = Path(__file__).with_name("tma_dump.ptx")
KERNEL = "tma_dump"
THREADS = 128
SHARED_BYTES = 16384 + 16
RANDOM_BOXES = 24
PAGE_BYTES = 65536

Coordinates = NDArray[np.int32]
Bytes = NDArray[np.uint8]


def descriptions(specs: Iterable[KernelSpec]) -> dict[TensorMapSpec, list[str]]:
    """Every distinct map of the entries -> what binds it ("w13 of <entry>")."""
    found: dict[TensorMapSpec, list[str]] = {}
    for spec in specs:
        for name, map_spec in (("w13", w13_map(spec)), ("w2", w2_map(spec))):
            found.setdefault(map_spec, []).append(f"{name} of {spec.name}")
    return found


def box_coordinates(spec: TensorMapSpec, seed: int = 0) -> Coordinates:
    """int32 [n, 3]: first and last box, every corner, boxes as the kernels load them, boxes at odd rows, and beyond each edge.

    Innermost coordinates are whole boxes, as the kernels' are: with some that cut a box, an H200 raised "illegal instruction"
    (seen with (-16, 433, 6624) among others), which no rule of the PTX text explains.
    """
    dims, box = np.array(spec.dims), np.array(spec.box)
    last = dims - box
    corners = [[last[d] if corner >> d & 1 else 0 for d in range(3)] for corner in range(8)]
    beyond = []
    for d in range(3):
        cut = (-box[d] + 1, -box[d] // 2, -1, last[d] + 1, dims[d] - 1, dims[d] + 5)
        for at in (-box[d], dims[d], *(cut if d else ())):
            place = last // 2 // box * box
            place[d] = at
            beyond.append(place)
    rng = np.random.default_rng(seed)
    aligned = rng.integers(0, last // box + 1, (RANDOM_BOXES, 3)) * box
    anywhere = rng.integers(-box // 2, last + box // 2 + 1, (RANDOM_BOXES, 3))
    anywhere[:, 0] = aligned[::-1, 0]
    return np.concatenate([np.array(corners), np.array(beyond), aligned, anywhere]).astype(np.int32)


def emulated_images(spec: TensorMapSpec, tensor: Buffer, coordinates: Coordinates) -> Bytes:
    """uint8 [n, box bytes]: the emulator's image of each box. Raises RuntimeError where the sanitizer finds an error."""
    images = np.zeros(len(coordinates) * spec.box_bytes, np.uint8)
    buffers = [
        tensor,
        Buffer("coordinates", np.ascontiguousarray(coordinates).view(np.uint8).ravel()),
        Buffer("images", images, "output"),
    ]
    result = emulator.emulate(
        PTX.read_text(),
        Launch((len(coordinates), 1, 1), (THREADS, 1, 1), dynamic_shared=SHARED_BYTES),
        buffers,
        [TensorMap(spec, tensor.name), Pointer("coordinates"), Pointer("images"), spec.box_bytes],
    )
    if not result.ok:
        raise RuntimeError(f"the emulator objects to {PTX.name}:\n{result.report()}")
    return images.reshape(len(coordinates), spec.box_bytes)


def device_buffer(tensor: torch.Tensor) -> Buffer:
    """A device tensor, uint8 [bytes], of which the emulator copies only what it reads."""

    @functools.lru_cache(maxsize=1024)
    def page(index: int) -> Bytes:
        return tensor[index * PAGE_BYTES : (index + 1) * PAGE_BYTES].cpu().numpy()

    return Buffer("tensor", SparseBuffer(tensor.numel(), PAGE_BYTES, page))


class Dump:
    """The kernel of tma_dump.ptx, loaded into torch's context."""

    def __init__(self) -> None:
        self._library = driver.call("cuLibraryLoadData", PTX.read_bytes() + b"\0", [], [], 0, [], [], 0)
        self._kernel = driver.call("cuLibraryGetKernel", self._library, KERNEL.encode())

    def images(self, map_bytes: bytes, box_bytes: int, coordinates: Coordinates, device: torch.device) -> Bytes:
        """uint8 [n, box bytes]: what TMA wrote."""
        places = torch.from_numpy(coordinates).to(device)
        images = torch.full((len(coordinates), box_bytes), 0xFF, dtype=torch.uint8, device=device)
        arguments = (
            (ctypes.c_ubyte * len(map_bytes)).from_buffer_copy(map_bytes),
            ctypes.c_uint64(places.data_ptr()),
            ctypes.c_uint64(images.data_ptr()),
            ctypes.c_uint32(box_bytes),
        )
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        function = driver.bindings().CUfunction(int(self._kernel))
        stream = torch.cuda.current_stream().cuda_stream
        grid, block = (len(coordinates), 1, 1), (THREADS, 1, 1)
        driver.call("cuLaunchKernel", function, *grid, *block, SHARED_BYTES, stream, ctypes.addressof(pointers), 0)
        return images.cpu().numpy()


def compare(spec: TensorMapSpec, dump: Dump, device: torch.device) -> dict[str, Any]:
    """One row of the results: a description, how many boxes, how many bytes differ and the first place where they do."""
    generator = torch.Generator(device).manual_seed(0)
    tensor = torch.randint(0, 256, (spec.bytes,), dtype=torch.uint8, device=device, generator=generator)
    coordinates = box_coordinates(spec)
    map_bytes = encode(spec, tensor.data_ptr())
    got = dump.images(map_bytes, spec.box_bytes, coordinates, device)
    want = emulated_images(spec, device_buffer(tensor), coordinates)
    different = np.argwhere(got != want)
    first = None
    if len(different):
        box, byte = map(int, different[0])
        first = f"box {coordinates[box].tolist()} byte {byte}: GPU {got[box, byte]:#x}, emulator {want[box, byte]:#x}"
    return {
        **dataclasses.asdict(spec),
        "tensor_bytes": spec.bytes,
        "boxes": len(coordinates),
        "bytes": int(got.size),
        "bytes_different": len(different),
        "first_difference": first,
        "ok": not len(different),
    }


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="results file")
    parser.add_argument("--commit", help="the commit that is measured, for the header")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: this script asks a GPU's TMA. The emulator's TMA alone is tested by tests/verification/test_agreement.py")
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability(device)[0] < 9:
        sys.exit(f"{torch.cuda.get_device_name(device)} has no TMA; Hopper or newer is needed")
    torch.zeros(1, device=device)  # torch's context becomes current
    manifest = Manifest.load()
    dump = Dump()
    rows = []
    for spec, bound in descriptions(entry.spec for entry in manifest.entries).items():
        rows.append(compare(spec, dump, device) | {"bound": bound})
        print(f"{spec}: {rows[-1]['boxes']} boxes, {rows[-1]['bytes_different']} of {rows[-1]['bytes']} bytes differ", flush=True)
    header = environment.header(device, manifest, arguments.commit) | {
        "kernel": hashlib.sha256(PTX.read_bytes()).hexdigest(),
    }
    report.write_json(arguments.out, header, rows=rows)
    failed = [row["first_difference"] for row in rows if not row["ok"]]
    print(*failed, sep="\n")
    print(f"{len(rows)} descriptions, {sum(row['boxes'] for row in rows)} boxes: {len(failed)} descriptions differ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
