"""Rows for what torch records when gradients are differentiated: its backward formulas, called as functions."""

from typing import Any

import torch

from ..case import Case, between, constant, distinct, randn

aten: Any = torch.ops.aten
u, x = randn(3, 4, seed=7), randn(3, 4)
wide = (constant(randn(3, 4, seed=3)) * 4.1).requires_grad_()
unit = between(0.05, 0.95, 3, 4)
maps, pixels = randn(2, 3, 4, 5), randn(2, 3, 2, 2, seed=1)
volumes, voxels = randn(1, 2, 3, 4, 5), randn(1, 2, 2, 2, 2, seed=1)
classes, weight = torch.tensor([1, 3, 1]), constant(between(0.3, 2.0, 4))
ELU = {"plain": (1.75, 1.0, 1.0), "selu": (1.625, 1.125, 1.0), "celu": (1.0, 1.0, 0.5)}


def total(t: Any, w: Any) -> Any:
    return torch.ones((), dtype=t.dtype) * (3.0 if w is None else float(w[classes].sum()))


def nll(reduction: int, w: Any, ignored: int = -100) -> Any:
    def call(grad: Any, t: Any) -> Any:
        kept = None if w is None else w.to(t.dtype)
        mask = classes != ignored
        sum_ = (mask if w is None else kept[classes] * mask).sum().to(t.dtype)
        return aten.nll_loss_backward(grad, t, classes, kept, reduction, ignored, sum_)

    return call


def convolution(transposed: bool) -> Any:
    def call(grad: Any, images: Any, kernels: Any) -> Any:
        how = ([2, 1], [1, 0], [1, 1], transposed, [0, 0], 2)
        return aten.convolution_backward(grad, images, kernels, [4], *how, [True] * 3)

    return call


def shape_of(transposed: bool) -> tuple[int, ...]:
    images, kernels = torch.zeros(2, 4, 5, 4), torch.zeros(4, 2, 3, 2)
    how = ([2, 1], [1, 0], [1, 1], transposed, [0, 0], 2)
    return tuple(torch.convolution(images, kernels, None, *how).shape)


def upsampled(name: str, grad: Any, dims: int) -> Case:
    function = getattr(aten, f"upsample_nearest{dims}d_backward")
    shape = [*grad.shape[:2], *(size // 2 for size in grad.shape[2:])]
    return Case(name, lambda t: function(t, [*grad.shape[2:]], shape), grad)


CASES = [
    Case("TanhBackwardBackward0", aten.tanh_backward, u, x),
    Case("SigmoidBackwardBackward0", aten.sigmoid_backward, u, unit),
    Case("GeluBackwardBackward0", aten.gelu_backward, u, wide),
    Case("GeluBackwardBackward0", lambda g, t: aten.gelu_backward(g, t, approximate="tanh"), u, wide, label="tanh"),
    Case("SoftplusBackwardBackward0", lambda g, t: aten.softplus_backward(g, t, 2.0, 5.0), u, wide),
    *(
        Case("EluBackwardBackward0", lambda g, t, c=c: aten.elu_backward(g, *c, False, t), u, wide, label=label)
        for label, c in ELU.items()
    ),
    Case("EluBackwardBackward0", lambda g, t: aten.elu_backward(g, 1.25, 1.125, 0.75, True, t), u, x, label="result"),
    Case("LogSigmoidBackwardBackward0", lambda g, t: aten.log_sigmoid_backward(g, t, (-t.abs()).exp().detach()), u, x),
    Case("HardswishBackwardBackward0", aten.hardswish_backward, u, wide),
    Case("LeakyReluBackwardBackward0", lambda g, t: aten.leaky_relu_backward(g, t, 0.3, False), u, x),
    Case("HardshrinkBackwardBackward0", lambda g, t: aten.hardshrink_backward(g, t, 0.5), u, x),
    Case("SoftshrinkBackwardBackward0", lambda g, t: aten.softshrink_backward(g, t, 0.5), u, x),
    Case("HardtanhBackwardBackward0", lambda g, t: aten.hardtanh_backward(g, t, -0.7, 0.8), u, x),
    Case("ThresholdBackwardBackward0", lambda g, t: aten.threshold_backward(g, t, 0.2), u, x),
    *(
        Case("MseLossBackwardBackward0", lambda g, a, b, how=how: aten.mse_loss_backward(g, a, b, how), grad, x, wide)
        for how, grad in ((0, u), (1, randn(seed=4)), (2, randn(seed=5)))
    ),
    Case("LogSoftmaxBackwardDataBackward0", lambda g, y: aten._log_softmax_backward_data(g, y, -1, y.dtype), u, x),
    Case("SoftmaxBackwardDataBackward0", lambda g, q: aten._softmax_backward_data(g, q, 0, q.dtype), u, unit),
    *(
        Case("NllLossBackwardBackward0", nll(how, w, ignored), grad, x, label=f"{how}-{w is None}-{ignored}")
        for how, grad in ((0, randn(3, seed=6)), (1, randn(seed=4)), (2, randn(seed=5)))
        for w, ignored in ((None, -100), (weight, -100), (weight, 3))
    ),
    Case(
        "NllLoss2DBackwardBackward0",
        lambda g, t: aten.nll_loss2d_backward(
            g, t, torch.tensor([[[0, 1]], [[2, 2]]]), None, 1, -100, t.new_tensor(4.0)
        ),
        randn(seed=4),
        randn(2, 3, 1, 2),
    ),
    Case(
        "AvgPool2DBackwardBackward0",
        lambda g, t: aten.avg_pool2d_backward(g, t, [2, 3], [2, 2], [1, 1], False, False, None),
        randn(2, 3, 3, 3, seed=2),
        maps,
    ),
    Case(
        "AvgPool2DBackwardBackward0",
        lambda g, t: aten.avg_pool2d_backward(g, t, [2, 3], [2, 2], [1, 1], True, True, 5),
        randn(2, 3, 3, 3, seed=2),
        maps,
        label="divisor",
    ),
    Case(
        "AvgPool3DBackwardBackward0",
        lambda g, t: aten.avg_pool3d_backward(g, t, [2], [1], [0], False, True, None),
        randn(1, 2, 2, 3, 4, seed=2),
        volumes,
    ),
    Case("AdaptiveAvgPool2DBackwardBackward0", aten._adaptive_avg_pool2d_backward, pixels, maps),
    Case("AdaptiveAvgPool3DBackwardBackward0", aten._adaptive_avg_pool3d_backward, voxels, volumes),
    *(
        Case(
            "ConvolutionBackwardBackward0",
            convolution(transposed),
            randn(*shape_of(transposed), seed=1),
            randn(2, 4, 5, 4, seed=2),
            randn(4, 2, 3, 2, seed=3),
            label="transposed" if transposed else "",
        )
        for transposed in (False, True)
    ),
    Case(
        "AdaptiveMaxPool2DBackwardBackward0",
        lambda g, t: aten.adaptive_max_pool2d_backward(g, t, aten.adaptive_max_pool2d(t, [2, 2])[1]),
        pixels,
        distinct(2, 3, 4, 5),
    ),
    Case(
        "AdaptiveMaxPool3DBackwardBackward0",
        lambda g, t: aten.adaptive_max_pool3d_backward(g, t, aten.adaptive_max_pool3d(t, [2, 2, 2])[1]),
        voxels,
        distinct(1, 2, 3, 4, 5),
    ),
    Case(
        "MaxPool3DWithIndicesBackwardBackward0",
        lambda g, t: aten.max_pool3d_with_indices_backward(
            g, t, [2], [1], [0], [1], False, aten.max_pool3d_with_indices(t, [2], [1])[1]
        ),
        randn(1, 2, 2, 3, 4, seed=2),
        distinct(1, 2, 3, 4, 5),
    ),
    Case(
        "EmbeddingDenseBackwardBackward0",
        lambda g: aten.embedding_dense_backward(g, torch.tensor([0, 2, 2]), 4, 1, False),
        u,
    ),
    upsampled("UpsampleNearest1DBackwardBackward0", randn(2, 3, 4), 1),
    upsampled("UpsampleNearest2DBackwardBackward0", randn(2, 3, 4, 6), 2),
    upsampled("UpsampleNearest3DBackwardBackward0", randn(1, 2, 4, 2, 4), 3),
]
