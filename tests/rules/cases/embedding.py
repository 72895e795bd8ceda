"""Rows for look-up tables: rows that repeat, padding, bags with weights."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..case import Case, distinct, randn

table = randn(6, 3)
rows = torch.tensor([1, 4, 1, 0, 5, 5, 2])
bags = torch.tensor([0, 2, 2, 5])
edges = [(0, 2), (2, 2), (2, 5), (5, 7)]
weights = randn(7, seed=1)


def plain_bags(how: str, padding: int | None = None) -> Any:
    """The same in operations that torch can differentiate twice."""

    def call(weight: Tensor, own: Tensor | None = None) -> Tensor:
        taken = weight[rows] if own is None else weight[rows] * own.unsqueeze(1)
        results = []
        for start, end in edges:
            entries = [i for i in range(start, end) if rows[i] != padding]
            bag = taken[entries]
            empty = bag.sum(0)
            results.append(empty if not entries else {"sum": bag.sum(0), "mean": bag.mean(0), "max": bag.amax(0)}[how])
        return torch.stack(results)

    return call


def bag(how: str, padding: int | None = None) -> Any:
    return lambda weight, own=None: F.embedding_bag(
        rows, weight, bags, mode=how, per_sample_weights=own, padding_idx=padding
    )


_BAG = "EmbeddingBagBackward0"
CASES = [
    Case("EmbeddingBackward0", lambda w: F.embedding(rows, w), table),
    Case("EmbeddingBackward0", lambda w: F.embedding(rows.view(7, 1), w, padding_idx=1), table, label="padding"),
    Case("EmbeddingBackward0", lambda w: F.embedding(rows, w, scale_grad_by_freq=True), table, label="frequency"),
    Case(_BAG, bag("sum"), table, reference=plain_bags("sum"), label="sum"),
    Case(_BAG, bag("mean"), table, reference=plain_bags("mean"), label="mean"),
    Case(_BAG, bag("max"), distinct(6, 3), reference=plain_bags("max"), label="max"),
    Case(_BAG, bag("sum", 5), table, reference=plain_bags("sum", 5), label="sum-padding"),
    Case(_BAG, bag("mean", 5), table, reference=plain_bags("mean", 5), label="mean-padding"),
    Case(_BAG, bag("sum"), table, weights, reference=plain_bags("sum"), label="weighted"),
]
