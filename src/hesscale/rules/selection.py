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
)
# the same element at the same place
register(Selection(pointwise=True), "AliasBackward0", "CloneBackward0", "ToCopyBackward0")
# picking elements by index
register(
    Selection(),
    "GatherBackward0",
    "IndexBackward0",
    "IndexSelectBackward0",
    "KthvalueBackward0",
    "MaskedSelectBackward0",
    "MedianBackward1",
    "ModeBackward0",
    "NanmedianBackward1",
    "SortBackward0",
    "SortBackward1",
    "TakeBackward0",
    "TopkBackward0",
)
# writing elements by index
register(
    Selection(),
    "DiagonalScatterBackward0",
    "IndexCopyBackward0",
    "IndexFillBackward0",
    "IndexFillBackward1",
    "IndexPutBackward0",
    "MaskedFillBackward0",
    "MaskedFillBackward1",
    "MaskedScatterBackward0",
    "ScatterBackward0",
    "ScatterBackward1",
    "ScatterAddBackward0",
    "SelectScatterBackward0",
    "SliceScatterBackward0",
)
# joining, splitting and repeating
register(
    Selection(),
    "BlockDiagBackward0",
    "CatBackward0",
    "ExpandBackward0",
    "RepeatBackward0",
    "SplitBackward0",
    "SplitWithSizesBackward0",
    "StackBackward0",
    "UnbindBackward0",
    "UnsafeSplitBackward0",
    "UnsafeSplitWithSizesBackward0",
)
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
