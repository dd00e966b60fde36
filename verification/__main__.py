"""``python -m verification <command> ...`` is ``python -m verification.<command> ...``."""

import importlib
import sys

COMMANDS = {
    "run": "run menu entries in the emulator and compare them with the reference",
    "mutation": "break the shipped PTX in every way on the list and see that it shows",
    "agreement": "hold the emulator against what an H200 computed",
    "golden": "on a Hopper GPU: record what agreement compares with",
    "tensor_maps": "on a GPU: compare the driver's tensor maps with the emulator's",
    "census": "compare the instructions of each cubin with those of its PTX",
    "static": "the static verifier sentryward on each PTX",
    "lint": "the compiler's own warnings",
}


def main() -> int:
    """Returns the command's exit status; 2 for an unknown command."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command not in COMMANDS:
        lines = [f"  {name:12} {what}" for name, what in COMMANDS.items()]
        print("usage: python -m verification COMMAND ...", *lines, sep="\n", file=sys.stderr)
        return 2
    module = importlib.import_module(f"verification.{command}")
    sys.argv = [f"python -m verification {command}", *sys.argv[2:]]
    return int(module.main() or 0)


if __name__ == "__main__":
    sys.exit(main())
