"""Rows for loss functions: all reductions, weights, targets that are variables too."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..case import Case, between, constant, randn

x, t = randn(3, 4), randn(3, 4, seed=1)
p, q = between(0.1, 0.9, 3, 4), between(0.1, 0.9, 3, 4, seed=1)
signs = constant(t).sign()
weight = constant(between(0.3, 2.0, 4))
classes = torch.tensor([1, 3, 1])
labels = torch.tensor([[0, 2, -1, 1], [3, -1, 0, 0], [1, 2, 3, -1]])
maps, pixels = randn(2, 3, 2, 2), torch.tensor([[[0, 1], [2, 2]], [[1, 0], [2, 1]]])


def loss(node: str, function: Any, *tensors: Any, label: str = "", **options: Any) -> list[Case]:
    """One row per reduction."""
    return [
        Case(
            f"{node}Backward0",
            lambda *args, how=how: function(*args, reduction=how, **cast(options, args[0].dtype)),
            *tensors,
            label=f"{label}-{how}".strip("-"),
        )
        for how in ("mean", "sum", "none")
    ]


def cast(options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: value.to(dtype) if isinstance(value, Tensor) else value for name, value in options.items()}


def multi_margin(scores: Any, y: Any, power: int, margin: float, weights: Any, reduction: str) -> Any:
    """The same in operations that torch can differentiate twice."""
    gaps = (margin - scores.gather(1, y[:, None]) + scores).clamp_min(0).pow(power)
    gaps = gaps * (1 - F.one_hot(y, scores.shape[1])) / scores.shape[1]
    losses = (gaps if weights is None else gaps * weights[y][:, None]).sum(1)
    return {"mean": losses.mean, "sum": losses.sum, "none": losses.clone}[reduction]()


def multilabel_margin(scores: Any, y: Any, reduction: str) -> Any:
    rows = []
    for row, targets in zip(scores, y, strict=True):
        end = targets.tolist().index(-1) if -1 in targets else len(targets)
        wanted = targets[:end]
        others = [i for i in range(len(row)) if i not in wanted]
        rows.append((1 - row[wanted][:, None] + row[others]).clamp_min(0).sum() / len(row))
    losses = torch.stack(rows)
    return {"mean": losses.mean, "sum": losses.sum, "none": losses.clone}[reduction]()


def margins(power: int, weights: Any, reduction: str) -> Case:
    options = {"p": power, "margin": 0.8, "weight": weights, "reduction": reduction}
    return Case(
        "MultiMarginLossBackward0",
        lambda s: F.multi_margin_loss(s, classes, **cast(options, s.dtype)),
        x,
        reference=lambda s: multi_margin(s, classes, power, 0.8, weights, reduction),
        label=f"{power}-{'weighted' if weights is not None else 'plain'}-{reduction}",
    )


sequences, spoken = (
    randn(6, 3, 4).log_softmax(-1).detach().requires_grad_(),
    torch.tensor([[1, 2, 2], [3, 1, 0], [2, 0, 0]]),
)
times, letters = (6, 5, 4), (3, 2, 1)


def alignments(x: Any) -> Any:
    """The loss by its recursion in plain operations, plus Σe^x less its value: torch's gradient is that of this sum."""
    losses = []
    for n, (length, count) in enumerate(zip(times, letters, strict=True)):
        states = [0, *(state for letter in spoken[n, :count].tolist() for state in (letter, 0))]
        scores = [x[0, n, states[0]], x[0, n, states[1]]] + [x.new_tensor(-1e30)] * (len(states) - 2)
        for time in range(1, length):
            scores = [
                torch.stack([scores[j] for j in range(max(i - 2, 0), i + 1) if _follows(states, j, i)]).logsumexp(0)
                + x[time, n, states[i]]
                for i in range(len(states))
            ]
        extra = x[:length, n].exp().sum()
        losses.append(extra - extra.detach() - torch.stack(scores[-2:]).logsumexp(0))
    return torch.stack(losses)


def _follows(states: list[int], j: int, i: int) -> bool:
    return i - j < 2 or (states[i] != 0 and states[i] != states[j])


CASES = [
    *loss("NllLoss", F.nll_loss, x, classes, weight=weight),
    *loss("NllLoss", F.nll_loss, x, classes, ignore_index=1, label="ignore"),
    *loss("NllLoss2D", F.nll_loss, maps, pixels, ignore_index=2),
    *loss("MseLoss", F.mse_loss, x, t),
    *loss("MseLoss", F.mse_loss, x, constant(t), label="data"),
    *loss("SmoothL1Loss", F.smooth_l1_loss, x, t, beta=0.7),
    *loss("HuberLoss", F.huber_loss, x, t, delta=0.7),
    *loss("BinaryCrossEntropy", F.binary_cross_entropy, p, q, weight=weight),
    *loss("BinaryCrossEntropy", F.binary_cross_entropy, p, constant(q), label="data"),
    *loss("BinaryCrossEntropyWithLogits", F.binary_cross_entropy_with_logits, x, q, weight=weight, pos_weight=weight),
    *loss("BinaryCrossEntropyWithLogits", F.binary_cross_entropy_with_logits, x, constant(q), label="data"),
    *loss("SoftMarginLoss", F.soft_margin_loss, x, signs),
    *(margins(power, w, how) for power in (1, 2) for w in (None, weight) for how in ("mean", "sum", "none")),
    *(
        Case(
            "MultilabelMarginLossBackward0",
            lambda s, how=how: F.multilabel_margin_loss(s, labels, reduction=how),
            x,
            reference=lambda s, how=how: multilabel_margin(s, labels, how),
            label=how,
        )
        for how in ("mean", "sum", "none")
    ),
    *(
        Case(
            f"CtcLossBackward{number}",
            lambda x, convert=convert: torch._ctc_loss(x, spoken, convert(times), convert(letters))[0],
            sequences,
            reference=alignments,
        )
        for number, convert in enumerate((tuple, torch.tensor))
    ),
]
