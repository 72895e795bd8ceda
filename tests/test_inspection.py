"""``hesscale.check``: what a pass would meet, told before it runs."""

import torch
from torch import nn

import hesscale

from .tensors import leaf


def test_check_lists_what_a_pass_will_meet() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    out = model(torch.randn(2, 5, 8))
    report = hesscale.check((out * torch.sigmoid(out)).sum())
    assert report.approximated == {"ScaledDotProductFlashAttentionForCpuBackward0": 1}
    assert report.exact["NativeLayerNormBackward0"] == 2
    assert report.missing == {}
    assert report.regions == 1
    assert report.shared >= 2  # two residual connections
    assert "\napproximate rule: 1 nodes of 1 kinds\n  ScaledDotProductFlashAttentionForCpuBackward0 x1\n" in str(report)
    assert str(report).startswith("exact rule: ")  # not "exact", which reads as a verdict on the result
    rates = leaf(3).detach().abs() + 1
    assert hesscale.check(torch.igamma(rates, leaf(3).abs()).sum()).missing == {"IgammaBackward0": 1}
