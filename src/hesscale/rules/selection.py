"""Operations whose Jacobian holds only zeros and ones: their own backward transports curvature. A list of names."""

from .families import Selection
from .table import register

# views, copies and permutations of elements
register(
    Selection(),
    "AsStridedBackward0",
    "ChannelShuffleBackward0",
    "DiagonalBackward0",
    "DiagonalBackward0_copy",
    "DiagEmbedBackward0",
    "FlipBackward0",
    "PermuteBackward0",
    "PixelShuffleBackward0",
    "PixelUnshuffleBackward0",
    "ReshapeAliasBackward0",
    "RollBackward0",
    "Rot90Backward0",
    "SelectBackward0",
    "SliceBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "SqueezeBackward4",
    "TBackward0",
    "TransposeBackward0",
    "UnfoldBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
    # the same in place
    "AsStridedBackward1",
    "SqueezeBackward3",
    "SqueezeBackward5",
    "TBackward1",
    "TransposeBackward1",
    "UnsqueezeBackward1",
    # the same where the result is a copy
    "AsStridedBackward0_copy",
    "LiftFreshBackward0",
    "NarrowCopyBackward0",
    "PermuteBackward0_copy",
    "ReshapeAliasBackward0_copy",
    "SelectBackward0_copy",
    "SliceBackward0_copy",
    "SqueezeBackward0_copy",
    "SqueezeBackward1_copy",
    "SqueezeBackward2_copy",
    "TBackward0_copy",
    "TransposeBackward0_copy",
    "UnfoldBackward0_copy",
    "UnsqueezeBackward0_copy",
    "ViewBackward0_copy",
)
# the same element at the same place
register(Selection(pointwise=True), "AliasBackward0", "AliasBackward0_copy", "CloneBackward0")
register(Selection(pointwise=True), "MaskedFillBackward0", "MaskedFillBackward1")
# picking elements by index
register(
    Selection(),
    "GatherBackward0",
    "IndexBackward0",
    "IndexSelectBackward0",
    "MaskedSelectBackward0",
    "TakeBackward0",
    "UnsafeIndexBackward0",
    "UnsafeMaskedIndexBackward0",
)
# picking elements by their values
register(
    Selection(linear=False),
    "CummaxBackward0",
    "CumminBackward0",
    "KthvalueBackward0",
    "MaxBackward0",
    "MedianBackward1",
    "MinBackward0",
    "ModeBackward0",
    "NanmedianBackward1",
    "SortBackward0",
    "SortBackward1",
    "TopkBackward0",
)
# the same where torch divides the gradient among equal elements
register(
    Selection(scaled=True, linear=False),
    "AmaxBackward0",
    "AminBackward0",
    "AminmaxBackward0",
)
# writing elements by index
register(
    Selection(),
    "AsStridedScatterBackward0",
    "DiagonalScatterBackward0",
    "FillBackward0",
    "FillBackward1",
    "FillBackward2",
    "FillBackward3",
    "ZeroBackward0",
    "IndexCopyBackward0",
    "IndexFillBackward0",
    "IndexFillBackward1",
    "IndexPutBackward0",
    "MaskedScatterBackward0",
    "MaxPool2DWithIndicesBackwardBackward0",
    "PutBackward0",
    "ScatterBackward0",
    "ScatterBackward1",
    "ScatterAddBackward0",
    "SelectScatterBackward0",
    "SliceScatterBackward0",
)
register(Selection(scaled=True), "IndexAddBackward0", "NativeDropoutBackwardBackward0")
register(
    Selection(scaled=True, linear=False), "IndexReduceBackward0", "ScatterReduceBackward0", "SegmentReduceBackward0"
)
# sums
register(
    Selection(),
    "SumBackward0",
    "SumBackward1",
    "TraceBackward0",
)
register(Selection(scaled=True), "MeanBackward0", "MeanBackward1")
# joining, splitting and repeating
register(
    Selection(),
    "BlockDiagBackward0",
    "CatBackward0",
    "ExpandBackward0",
    "ExpandBackward0_copy",
    "RepeatBackward0",
    "SplitBackward0",
    "SplitBackward0_copy",
    "SplitWithSizesBackward0",
    "SplitWithSizesBackward0_copy",
    "StackBackward0",
    "UnbindBackward0",
    "UnbindBackward0_copy",
    "UnsafeSplitBackward0",
    "UnsafeSplitWithSizesBackward0",
)
# patches of images
register(
    Selection(),
    "Col2ImBackward0",
    "Im2ColBackward0",
    "UpsampleNearest1DBackward0",
    "UpsampleNearest2DBackward0",
    "UpsampleNearest3DBackward0",
    "UpsampleNearestExact1DBackward0",
    "UpsampleNearestExact2DBackward0",
    "UpsampleNearestExact3DBackward0",
)
# random numbers do not depend on their parameters, as torch has it
register(
    Selection(),
    *("BernoulliBackward0", "BernoulliBackward1", "BernoulliBackward2"),
    "UniformBackward0",
    *("NormalBackward0", "NormalBackward1", "NormalBackward2", "NormalBackward3"),
)
# sequences of unequal length, module hooks
register(Selection(), "PackPaddedSequenceBackward0", "BackwardHookFunctionBackward")
# padding and cutting
register(
    Selection(),
    "ConstantPadNdBackward0",
    "ReflectionPad1DBackward0",
    "ReflectionPad2DBackward0",
    "ReflectionPad3DBackward0",
    "ReplicationPad1DBackward0",
    "ReplicationPad2DBackward0",
    "ReplicationPad3DBackward0",
    "TrilBackward0",
    "TriuBackward0",
)
