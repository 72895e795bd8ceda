"""Policies and their losses in plain torch: hesscale needs only their graph.

A policy turns a network's outputs and actions into log-probabilities log π; a loss averages over the last dimension and
adds up what lies before it, so that many runs can stand side by side. With A the advantage of the action taken:

    policy gradient (A2C)   −A log π                          PPO   −min(r A, clip(r, 1 ± ε) A),   r = π / π_old

At the outputs of the network, where the last layer's diagonal follows exactly, second derivatives are

    softmax, logit i        policy gradient   A π_i (1 − π_i)                (π_i of logit i, a the action taken)
                            PPO, not clipped  −(A/π_old) π_a ((1{i=a} − π_i)² − π_i (1 − π_i))
    Gaussian, mean μ        policy gradient   A / v                          (v the variance)
                            PPO, not clipped  −(A/π_old) π ((a − μ)²/v − 1) / v
    Gaussian, variance v    policy gradient   A ((a − μ)²/v − ½) / v²

They are negative where A says so. The code that came with the paper's follow-up wrote such diagonals out by hand and
got signs and factors wrong: the log-likelihood's sign in place of the loss's (Gaussian), no minus in front of PPO's, no
advantage in the softmax's, π (1 − π)(1 − 2π) of the action taken in the place of all logits. Here nobody writes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CLIP = 0.2


@dataclass(frozen=True)
class Policy:
    """A family of distributions over actions, whose parameters are a network's outputs [..., outputs]."""

    log_probability: Callable[[Tensor, Tensor], Tensor]  # of outputs and actions
    sample: Callable[[Tensor, Tensor], Tensor]  # from outputs and noise uniform in (0, 1), shaped as the outputs
    outputs: Callable[[int], int]  # how many outputs so many choices, or dimensions, of actions need


def softmax_log_probability(logits: Tensor, actions: Tensor) -> Tensor:
    """log π(a) of discrete actions."""
    return logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def _softmax_sample(logits: Tensor, noise: Tensor) -> Tensor:
    return (logits - (-noise.log()).log()).argmax(-1)  # Gumbel's trick


def gaussian_log_probability(outputs: Tensor, actions: Tensor) -> Tensor:
    """Σ_d −½ ((a_d − μ_d)²/v_d + log v_d + log 2π), outputs being all μ_d, then all log v_d."""
    mean, log_variance = outputs.chunk(2, -1)
    error = (actions - mean) ** 2 * (-log_variance).exp()
    return -0.5 * (error + log_variance + math.log(2 * math.pi)).sum(-1)


def _gaussian_sample(outputs: Tensor, noise: Tensor) -> Tensor:
    mean, log_variance = outputs.chunk(2, -1)
    normal = math.sqrt(2) * torch.erfinv(2 * noise[..., : mean.shape[-1]] - 1)
    return mean + (0.5 * log_variance).exp() * normal


SOFTMAX = Policy(softmax_log_probability, _softmax_sample, lambda choices: choices)
GAUSSIAN = Policy(gaussian_log_probability, _gaussian_sample, lambda dimensions: 2 * dimensions)


def policy_gradient(log_probability: Tensor, advantage: Tensor) -> Tensor:
    """−A log π."""
    return -(advantage * log_probability).mean(-1).sum()


def ppo_clip(log_probability: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """−min(r A, clip(r) A), r = π / π_old."""
    ratio = (log_probability - old).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantage, clipped * advantage).mean(-1).sum()


def squared_error(values: Tensor, returns: Tensor) -> Tensor:
    """½ (V − R)², of the critic."""
    return 0.5 * ((values - returns) ** 2).mean(-1).sum()
