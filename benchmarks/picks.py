"""Random experts for a sequence of launches, and router logits that make the kernel choose them."""

from __future__ import annotations

import torch

CHOSEN_LOGIT = 5.0
OTHER_LOGIT = -5.0
"""Sigmoids of about 0.99 and 0.01: a gap that no noise below and no bias of the size of BIAS can close, nor the bias of two experts
that of a group's score: 0.99 + 0.00 - 2 * BIAS is more than 0.01 + 0.01 + 2 * BIAS."""
NOISE = 0.5
BIAS = 0.2


def random_picks(launches: int, tokens: int, top_k: int, experts: int, seed: int, groups: int = 0, top_groups: int = 0) -> torch.Tensor:
    """Experts of each token, INT64 [launches, tokens, top_k].

    Every token draws on its own, each expert with equal chances: distinct within the token, as routing always is, while tokens may
    share experts, as they do in reality.

    Args:
        groups, top_groups: of grouped scoring: the token's experts lie in ``top_groups`` of ``groups`` groups of adjacent experts.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        if not groups:
            return torch.randperm(experts, generator=generator)[:top_k]
        size = experts // groups
        kept = torch.randperm(groups, generator=generator)[:top_groups]
        allowed = (kept[:, None] * size + torch.arange(size)).flatten()
        return allowed[torch.randperm(len(allowed), generator=generator)[:top_k]]

    return torch.stack([torch.stack([draw() for _ in range(tokens)]) for _ in range(launches)])


def logits_for(picks: torch.Tensor, experts: int, seed: int) -> torch.Tensor:
    """FP32 [..., experts] whose ``top_k`` best are the picks [..., top_k], in no particular order, under every scoring."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.full((*picks.shape[:-1], experts), OTHER_LOGIT).scatter_(-1, picks, CHOSEN_LOGIT)
    return logits + NOISE * (2 * torch.rand(logits.shape, generator=generator) - 1)


def bias_for(experts: int, seed: int) -> torch.Tensor:
    """FP32 [experts]: positive and negative, too small to change what :func:`logits_for` chose."""
    return BIAS * (2 * torch.rand(experts, generator=torch.Generator().manual_seed(seed)) - 1)
