"""Look-up of rows in a table, and sums, means and maxima of such rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .calculus import pull
from .families import Coupled, Curvatures, Selection, signed
from .table import register

_SUM, _MEAN, _MAX = range(3)

# rows with padding_idx get nothing, and scale_grad_by_freq divides curvature as it divides the gradient
register(Selection(), "EmbeddingBackward0")


def embedding_bag(node: Any, s: Tensor | None, g: Tensor | None) -> Curvatures:
    """y_b = Σ_j c_j W[row_j] over the entries j of bag b. A row that occurs twice in a bag counts with (c_1 + c_2)²."""
    if s is None:
        return None, None
    if node._saved_mode == _MAX:
        return pull(node, s)[0], None
    rows, bags = node._saved_indices, node._saved_result1
    if len(bags) != len(rows):  # torch leaves the bag of each entry out where it can do without
        bags = _bags(node._saved_offsets, len(rows))
    kept = rows != signed(node._saved_padding_idx)
    weights = torch.ones_like(rows, dtype=s.dtype) * kept
    if node._saved_mode == _MEAN:
        weights = weights / node._saved_result2.clamp_min(1)[bags]
    own = node._saved_per_sample_weights
    if own is not None:
        weights = weights * own
    wanted = node.next_functions
    table = _of_table(node, s, rows, bags, weights) if wanted[0][0] is not None else None
    return table, _of_weights(node, s, rows, bags, kept) if len(wanted) > 1 and wanted[1][0] is not None else None


def _bags(offsets: Tensor, count: int) -> Tensor:
    starts = torch.zeros(count + 1, dtype=torch.long, device=offsets.device)
    starts.index_add_(0, offsets, torch.ones_like(offsets))
    return starts[:count].cumsum(0) - 1


def _of_table(node: Any, s: Tensor, rows: Tensor, bags: Tensor, weights: Tensor) -> Tensor:
    size = node._saved_weight_sym_argsize_0
    pairs, order = (bags * size + rows).sort(stable=True)
    first = torch.cat([pairs.new_ones(min(1, len(pairs)), dtype=torch.bool), pairs[1:] != pairs[:-1]])
    place = first.cumsum(0) - 1  # equal pairs share one; as many as there are entries, so that sizes depend on no data
    coefficients = torch.zeros_like(weights).index_add_(0, place, weights[order])
    known = torch.zeros_like(pairs).index_copy_(0, place, pairs)
    found = s[known // size] * coefficients.square().unsqueeze(1)
    return s.new_zeros(size, s.shape[1]).index_add_(0, known % size, found)


def _of_weights(node: Any, s: Tensor, rows: Tensor, bags: Tensor, kept: Tensor) -> Tensor:
    found: Tensor = (s[bags] * node._saved_weight[rows].square()).sum(1) * kept
    return found


register(Coupled(embedding_bag), "EmbeddingBagBackward0")
