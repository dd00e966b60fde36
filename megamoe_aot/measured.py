"""Measured times of both structures: data for structures.py, written by benchmarks/choose_structures.py and not by hand."""

from __future__ import annotations

# (hidden, inter, experts, top_k, scoring, layout, arch, tokens, structure, microseconds)
ROWS: tuple[tuple[int, int, int, int, str, str, str, int, str, float], ...] = ()
