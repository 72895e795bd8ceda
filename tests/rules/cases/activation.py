"""Rows for activation functions: of each both branches, in and out of place."""

import torch
import torch.nn.functional as F

from ..case import Case, randn

x = randn(3, 4)
wide = randn(4, 5)
with torch.no_grad():
    wide *= 3.1


def fixed_noise(function):  # type: ignore[no-untyped-def]
    """The function with the same random slopes at every call."""

    def call(t):  # type: ignore[no-untyped-def]
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return function(t)

    return call


SIXTH = float(torch.tensor(1 / 6, dtype=torch.float32))  # as in the backward of torch's hardsigmoid
# torch rounds 1/alpha of CELU to single precision: an alpha whose inverse is exact hides that
CASES = [
    Case("SigmoidBackward0", torch.sigmoid, x),
    Case("LogSigmoidBackward0", F.logsigmoid, wide),
    Case("SoftplusBackward0", F.softplus, wide),
    Case("SoftplusBackward0", lambda t: F.softplus(t, beta=3.0, threshold=4.0), wide, label="threshold"),
    Case("EluBackward0", lambda t: F.elu(t, 1.7), wide),
    Case("EluBackward0", F.selu, wide, label="selu"),
    Case("EluBackward1", lambda t: F.elu_(t + 0, 0.8), wide),
    Case("EluBackward1", lambda t: F.selu_(t + 0), wide, label="selu"),
    Case("CeluBackward0", lambda t: F.celu(t, 2.0), wide),
    Case("CeluBackward1", lambda t: F.celu_(t + 0, 0.5), wide),
    Case("GeluBackward0", F.gelu, wide),
    Case("GeluBackward0", lambda t: F.gelu(t, approximate="tanh"), wide, label="tanh"),
    Case("SiluBackward0", F.silu, wide),
    Case("SiluBackward0", lambda t: F.silu(t + 0, inplace=True), wide, label="in-place"),
    Case("MishBackward0", F.mish, wide),
    Case("HardswishBackward0", F.hardswish, wide),
    Case("PreluKernelBackward0", F.prelu, wide, randn(5, seed=1)),
    Case("PreluKernelBackward0", F.prelu, randn(2, 3, 4), randn(1, seed=2), label="shared"),
    Case("GluBackward0", lambda t: F.glu(t, 1), x),
    Case("GluBackward0", lambda t: F.glu(t, -2), randn(2, 4, 3), label="inner-dim"),
    Case("HardshrinkBackward0", F.hardshrink, x),
    Case("HardsigmoidBackward0", F.hardsigmoid, wide, reference=lambda t: F.relu6(t + 3) * SIXTH),
    Case("HardtanhBackward0", F.hardtanh, wide),
    Case("HardtanhBackward0", F.relu6, wide, label="relu6"),
    Case("LeakyReluBackward0", F.leaky_relu, x),
    Case("LeakyReluBackward1", lambda t: F.leaky_relu_(t + 0, 0.3), x),
    Case("ReluBackward0", F.relu, x),
    Case("ReluBackward0", lambda t: F.relu_(t + 0), x, label="in-place"),
    Case("RreluWithNoiseBackward0", fixed_noise(lambda t: F.rrelu(t, training=True)), x),
    Case("RreluWithNoiseBackward0", F.rrelu, x, label="eval"),
    Case("RreluWithNoiseBackward1", fixed_noise(lambda t: F.rrelu_(t + 0, training=True)), x),
    Case("SoftshrinkBackward0", F.softshrink, wide),
    Case("ThresholdBackward0", lambda t: F.threshold(t, 0.2, 3.0), x),
    Case("ThresholdBackward1", lambda t: F.threshold_(t + 0, 0.2, 3.0), x),
    Case("NativeDropoutBackward0", fixed_noise(lambda t: torch.native_dropout(t, 0.4, True)[0]), x),
]
