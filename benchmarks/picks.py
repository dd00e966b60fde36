"""Random experts for a sequence of launches, and router logits that make the kernel choose them."""

from __future__ import annotations

import torch

CHOSEN_LOGIT = 5.0
OTHER_LOGIT = -5.0
"""Sigmoids of about 0.99 and 0.01: a gap that no noise below and no bias of the size of BIAS can close."""
NOISE = 0.5
BIAS = 0.2


def random_picks(launches: int, tokens: int, top_k: int, experts: int, seed: int) -> torch.Tensor:
    """Experts of each token, INT64 [launches, tokens, top_k].

    All routes of a launch are distinct where there are enough experts, so that each launch reads tokens * top_k experts;
    beyond that each token draws on its own (distinct within the token, as routing always is).
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> torch.Tensor:
        return torch.randperm(experts, generator=generator)[:count]

    if tokens * top_k <= experts:
        return torch.stack([draw(tokens * top_k).view(tokens, top_k) for _ in range(launches)])
    return torch.stack([torch.stack([draw(top_k) for _ in range(tokens)]) for _ in range(launches)])


def logits_for(picks: torch.Tensor, experts: int, seed: int) -> torch.Tensor:
    """FP32 [..., experts] whose ``top_k`` best are the picks [..., top_k], in no particular order."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.full((*picks.shape[:-1], experts), OTHER_LOGIT).scatter_(-1, picks, CHOSEN_LOGIT)
    return logits + NOISE * (2 * torch.rand(logits.shape, generator=generator) - 1)


def bias_for(experts: int, seed: int) -> torch.Tensor:
    """FP32 [experts]: positive and negative, too small to change what :func:`logits_for` chose."""
    return BIAS * (2 * torch.rand(experts, generator=torch.Generator().manual_seed(seed)) - 1)
