"""Rows for views, indexing, joining and padding."""

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..case import Case, constant, distinct, randn

x, cube, square = randn(3, 4), randn(2, 3, 4), randn(4, 4)
v = randn(5)
image = distinct(2, 4, 4, 6)
spread = distinct(3, 4)
rows = torch.tensor([2, 0, 2])
once = torch.tensor([2, 0])
places = torch.tensor([[1, 3], [0, 0], [2, 1]])
apart = torch.tensor([[1, 3], [0, 2], [2, 1]])
mask = constant(randn(3, 4, seed=3)) > 0
patch = randn(2, 4, seed=5)


def index_reduce(how: str) -> Callable[[Tensor, Tensor], Tensor]:
    def call(tensor: Tensor, source: Tensor) -> Tensor:
        with warnings.catch_warnings(action="ignore"):  # torch calls it a beta feature
            return tensor.index_reduce(0, once, source, how)

    return call


CASES = [
    Case("AsStridedBackward0", lambda t: t.as_strided((2, 3), (1, 4)), x),
    Case("ChannelShuffleBackward0", lambda t: F.channel_shuffle(t, 2), image),
    Case("DiagonalBackward0", lambda t: t.diagonal(1), x),
    Case("DiagonalBackward0_copy", torch.diag, x),
    Case("DiagEmbedBackward0", torch.diag_embed, x),
    Case("FlipBackward0", lambda t: t.flip(0, 1), x),
    Case("PermuteBackward0", lambda t: t.permute(2, 0, 1), cube),
    Case("PixelShuffleBackward0", lambda t: F.pixel_shuffle(t, 2), image),
    Case("PixelUnshuffleBackward0", lambda t: F.pixel_unshuffle(t, 2), image),
    Case("ReshapeAliasBackward0", lambda t: torch.ops.aten._reshape_alias(t, (4, 3), (3, 1)), x),
    Case("RollBackward0", lambda t: t.roll(2, 1), x),
    Case("Rot90Backward0", torch.rot90, x),
    Case("SelectBackward0", lambda t: t[:, 1], x),
    Case("SliceBackward0", lambda t: t[:, 1::2], x),
    Case("SqueezeBackward0", torch.squeeze, randn(1, 3, 1)),
    Case("SqueezeBackward1", lambda t: t.squeeze(-1), randn(3, 1)),
    Case("SqueezeBackward2", lambda t: t.squeeze((0, 2)), randn(1, 3, 1)),
    Case("SqueezeBackward4", lambda t, m: t @ m, v, randn(5, 3)),
    Case("TBackward0", torch.t, x),
    Case("TransposeBackward0", lambda t: t.transpose(0, -1), cube),
    Case("UnfoldBackward0", lambda t: t.unfold(1, 3, 1), x),
    Case("UnsafeViewBackward0", lambda t: torch.ops.aten._unsafe_view(t, (2, 6)), x),
    Case("UnsqueezeBackward0", lambda t: t.unsqueeze(-2), x),
    Case("ViewBackward0", lambda t: t.view(2, 6), x),
    Case("AliasBackward0", torch.ops.aten.alias, x),
    Case("CloneBackward0", torch.clone, x),
    Case("ToCopyBackward0", lambda t: t.to(torch.float64, copy=True), x),
    Case("GatherBackward0", lambda t: t.gather(1, places), x),
    Case("IndexBackward0", lambda t: t[rows], x),
    Case("IndexBackward0", lambda t: t[mask], x, label="mask"),
    Case("IndexSelectBackward0", lambda t: t.index_select(0, rows), x),
    Case("MaskedSelectBackward0", lambda t: t.masked_select(mask), x),
    Case("TakeBackward0", lambda t: t.take(places), x),
    Case("CummaxBackward0", lambda t: t.cummax(1)[0], spread),
    Case("CumminBackward0", lambda t: t.cummin(1)[0], spread),
    Case("KthvalueBackward0", lambda t: t.kthvalue(2, 1)[0], spread),
    Case("MaxBackward0", lambda t: t.max(1)[0], spread),
    Case("MinBackward0", lambda t: t.min(1, keepdim=True)[0], spread),
    Case("MedianBackward1", lambda t: t.median(1)[0], spread),
    Case("ModeBackward0", lambda t: t.mode(1)[0], spread),
    Case("NanmedianBackward1", lambda t: t.nanmedian(1)[0], spread),
    Case("SortBackward0", lambda t: t.sort(1, descending=True)[0], spread),
    Case("SortBackward1", lambda t: torch.sort(t, stable=True, dim=0)[0], spread),
    Case("TopkBackward0", lambda t: t.topk(2, 1)[0], spread),
    Case("AmaxBackward0", lambda t: t.amax((0, 2)), distinct(2, 3, 4)),
    Case("AminBackward0", lambda t: t.amin(1, keepdim=True), spread),
    Case("AminmaxBackward0", lambda t: torch.aminmax(t, dim=1), spread),
    Case("MaxBackward1", torch.max, spread),
    Case("MinBackward1", torch.min, spread),
    Case("MedianBackward0", torch.median, spread),
    Case("NanmedianBackward0", torch.nanmedian, spread),
    Case("DiagonalScatterBackward0", lambda t, d: t.diagonal_scatter(d), square, randn(4)),
    Case("IndexAddBackward0", lambda t, d: t.index_add(0, rows[:2], d, alpha=3), x, patch),
    Case("IndexCopyBackward0", lambda t, d: t.index_copy(0, once, d), x, patch),
    Case("IndexFillBackward0", lambda t: t.index_fill(0, once, 2.0), x),
    Case("IndexFillBackward1", lambda t, d: t.index_fill(0, once, d), x, randn(seed=4)),
    Case("IndexPutBackward0", lambda t, d: t.index_put((once,), d), x, patch),
    Case("IndexPutBackward0", lambda t, d: t.index_put((rows[:2],), d, accumulate=True), x, patch, label="accumulate"),
    Case("IndexReduceBackward0", index_reduce("mean"), x, patch),
    Case("IndexReduceBackward0", index_reduce("prod"), x, patch, label="prod"),
    Case("MaskedFillBackward0", lambda t: t.masked_fill(mask, 2.0), x),
    Case("MaskedFillBackward1", lambda t, d: t.masked_fill(mask, d), x, randn(seed=4)),
    Case("MaskedScatterBackward0", lambda t, d: t.masked_scatter(mask, d), x, randn(12, seed=4)),
    Case("ScatterBackward0", lambda t, d: t.scatter(1, apart, d), x, randn(3, 2, seed=4)),
    Case("ScatterBackward1", lambda t: t.scatter(1, apart, 2.0), x),
    Case("ScatterAddBackward0", lambda t, d: t.scatter_add(1, places, d), x, randn(3, 2, seed=4)),
    Case("ScatterReduceBackward0", lambda t, d: t.scatter_reduce(1, places, d, "sum"), x, randn(3, 2, seed=4)),
    Case("ScatterReduceBackward0", lambda t, d: t.scatter_reduce(1, places, d, "mean"), x, randn(3, 2), label="mean"),
    Case("ScatterReduceBackward0", lambda t, d: t.scatter_reduce(1, places, d, "prod"), x, randn(3, 2), label="prod"),
    Case(
        "ScatterReduceBackward0", lambda t, d: t.scatter_reduce(1, apart, d, "amax"), spread, randn(3, 2), label="amax"
    ),
    Case("SelectScatterBackward0", lambda t, d: t.select_scatter(d, 0, 1), x, randn(4, seed=4)),
    Case("SliceScatterBackward0", lambda t, d: t.slice_scatter(d, 0, 1), x, patch),
    Case("BlockDiagBackward0", torch.block_diag, x, patch),
    Case("CatBackward0", lambda *t: torch.cat(t), x, patch),
    Case("StackBackward0", lambda *t: torch.stack(t, 1), x, randn(3, 4, seed=2)),
    Case("ExpandBackward0", lambda t: t.expand(2, 3, 4), randn(3, 1)),
    Case("RepeatBackward0", lambda t: t.repeat(2, 1, 3), x),
    Case("SplitBackward0", lambda t: t.split(2, 1), x),
    Case("SplitBackward0", lambda t: t.split(2, 1)[1], x, label="one-part"),
    Case("SplitWithSizesBackward0", lambda t: t.split([1, 3], 1), x),
    Case("UnbindBackward0", lambda t: t.unbind(1)[1:], x),
    Case("UnsafeSplitBackward0", lambda t: t.unsafe_split(2, 1), x),
    Case("UnsafeSplitWithSizesBackward0", lambda t: t.unsafe_split_with_sizes([1, 3], 1), x),
    Case("Col2ImBackward0", lambda t: F.fold(t, (3, 3), 2), randn(1, 8, 4)),
    Case("Im2ColBackward0", lambda t: F.unfold(t, 2, padding=1, stride=2), image),
    Case("ConstantPadNdBackward0", lambda t: F.pad(t, (1, -1, 2, 0), value=3.0), x),
    Case("ReflectionPad1DBackward0", lambda t: F.pad(t, (1, 2), mode="reflect"), cube),
    Case("ReflectionPad2DBackward0", lambda t: F.pad(t, (1, 2, 1, 1), mode="reflect"), image),
    Case("ReflectionPad3DBackward0", lambda t: F.pad(t, (1,) * 6, mode="reflect"), randn(1, 1, 2, 3, 2)),
    Case("ReplicationPad1DBackward0", lambda t: F.pad(t, (1, 2), mode="replicate"), cube),
    Case("ReplicationPad2DBackward0", lambda t: F.pad(t, (1, 2, 1, 1), mode="replicate"), image),
    Case("ReplicationPad3DBackward0", lambda t: F.pad(t, (1,) * 6, mode="replicate"), randn(1, 1, 2, 3, 2)),
    Case("TrilBackward0", torch.tril, square),
    Case("TriuBackward0", lambda t: t.triu(1), square),
]
