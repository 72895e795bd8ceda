"""Rows for views, indexing, joining and padding."""

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

from ..case import Case, between, constant, distinct, randn

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


def segments(how: str) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.segment_reduce(t, how, lengths=torch.tensor([2, 1]), axis=0)


def fixed_draw(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with the same random numbers at every call."""

    def call(*tensors: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return function(*tensors)

    return call


def unpooled(t: Tensor) -> Tensor:
    images, places = distinct(1, 1, 4, 6).detach().to(t.dtype), torch.tensor([[[[0, 3, 5], [12, 15, 23]]]])
    return torch.ops.aten.max_pool2d_with_indices_backward(t, images, [2, 2], [2, 2], [0, 0], [1, 1], False, places)


def hooked(t: Tensor) -> Tensor:
    """A module with a backward hook of its own."""
    module = torch.nn.Identity()
    module.register_full_backward_hook(lambda *_: None)
    return module(t)


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
    Case("AsStridedBackward1", lambda t: (t + 0).as_strided_((2, 3), (1, 4)), x),
    Case("SqueezeBackward3", lambda t: (t + 0).squeeze_(), randn(1, 3, 1)),
    Case("SqueezeBackward5", lambda t: (t + 0).squeeze_((0, 2)), randn(1, 3, 1)),
    Case("TBackward1", lambda t: (t + 0).t_(), x),
    Case("TransposeBackward1", lambda t: (t + 0).transpose_(0, 1), x),
    Case("UnsqueezeBackward1", lambda t: (t + 0).unsqueeze_(1), x),
    Case("LiftFreshBackward0", torch.ops.aten.lift_fresh, x),
    Case("UnsafeIndexBackward0", lambda t: torch.ops.aten._unsafe_index(t, [rows]), x),
    Case("FillBackward2", lambda t: (t + 0).fill_(2.0), x),
    Case("FillBackward3", lambda t, d: (t + 0).fill_(d), x, randn(seed=4)),
    Case("ZeroBackward0", lambda t: (t + 0).zero_(), x),
    Case("UniformBackward0", fixed_draw(lambda t: (t + 0).uniform_()), x),
    Case("AsStridedBackward0_copy", lambda t: torch.as_strided_copy(t, (2, 3), (1, 4)), x),
    Case("NarrowCopyBackward0", lambda t: torch.narrow_copy(t, 1, 1, 2), x),
    Case("PermuteBackward0_copy", lambda t: torch.permute_copy(t, (2, 0, 1)), cube),
    Case("ReshapeAliasBackward0_copy", lambda t: torch.ops.aten._reshape_alias_copy(t, (4, 3), (3, 1)), x),
    Case("SelectBackward0_copy", lambda t: torch.select_copy(t, 1, 1), x),
    Case("SliceBackward0_copy", lambda t: torch.slice_copy(t, 1, 1), x),
    Case("SqueezeBackward0_copy", torch.squeeze_copy, randn(1, 3, 1)),
    Case("SqueezeBackward1_copy", lambda t: torch.squeeze_copy(t, -1), randn(3, 1)),
    Case("SqueezeBackward2_copy", lambda t: torch.squeeze_copy(t, (0, 2)), randn(1, 3, 1)),
    Case("TBackward0_copy", torch.t_copy, x),
    Case("TransposeBackward0_copy", lambda t: torch.transpose_copy(t, 0, 1), x),
    Case("UnfoldBackward0_copy", lambda t: torch.unfold_copy(t, 1, 3, 1), x),
    Case("UnsqueezeBackward0_copy", lambda t: torch.unsqueeze_copy(t, 1), x),
    Case("ViewBackward0_copy", lambda t: torch.view_copy(t, (2, 6)), x),
    Case("ExpandBackward0_copy", lambda t: torch.expand_copy(t, (2, 3, 4)), randn(3, 1)),
    Case("SplitBackward0_copy", lambda t: torch.split_copy(t, 2, 1), x),
    Case("SplitWithSizesBackward0_copy", lambda t: torch.split_with_sizes_copy(t, [1, 3], 1), x),
    Case("UnbindBackward0_copy", lambda t: torch.unbind_copy(t, 1), x),
    Case("AliasBackward0_copy", torch.alias_copy, x),
    Case("UnsafeMaskedIndexBackward0", lambda t: torch.ops.aten._unsafe_masked_index(t, mask[:, :1], [rows], 0.0), x),
    Case("AsStridedScatterBackward0", lambda t, d: t.as_strided_scatter(d, (2, 4), (4, 1)), x, patch),
    Case("FillBackward0", lambda t: torch.fill(t, 2.0), x),
    Case("FillBackward1", torch.fill, x, randn(seed=4)),
    Case("MaxPool2DWithIndicesBackwardBackward0", unpooled, distinct(1, 1, 2, 3)),
    Case("PutBackward0", lambda t, d: torch.put(t, apart, d), x, randn(3, 2, seed=4)),
    Case("NativeDropoutBackwardBackward0", lambda t: torch.ops.aten.native_dropout_backward(t, mask, 2.0), x),
    Case("SegmentReduceBackward0", segments("mean"), x, reference=lambda t: torch.stack([t[:2].mean(0), t[2]])),
    Case(
        "SegmentReduceBackward0",
        segments("prod"),
        x,
        reference=lambda t: torch.stack([t[:2].prod(0), t[2]]),
        label="prod",
    ),
    Case("BernoulliBackward0", fixed_draw(torch.bernoulli), between(0.1, 0.9, 3, 4)),
    Case("BernoulliBackward1", fixed_draw(lambda t, p: (t + 0).bernoulli_(p)), x, between(0.1, 0.9, 3, 4)),
    Case("BernoulliBackward2", fixed_draw(lambda t: (t + 0).bernoulli_(0.4)), x),
    Case("NormalBackward0", fixed_draw(lambda t: (t + 0).normal_()), x),
    Case("NormalBackward1", fixed_draw(lambda t: torch.normal(t, 2.0)), x),
    Case("NormalBackward2", fixed_draw(lambda t: torch.normal(2.0, t)), between(0.1, 0.9, 3, 4)),
    Case("NormalBackward3", fixed_draw(torch.normal), x, between(0.1, 0.9, 3, 4)),
    Case("PackPaddedSequenceBackward0", lambda t: pack_padded_sequence(t, [4, 2, 1]).data, randn(4, 3, 2)),
    Case("BackwardHookFunctionBackward", hooked, x),
    Case("AliasBackward0", torch.ops.aten.alias, x),
    Case("CloneBackward0", torch.clone, x),
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
