"""rank=k in use: tokens and mixed batches, every way to call it, and what is refused."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hesscale

from ..optim.small import random
from .networks import CLASSES, LABELS, LOSSES, N, blocks, columns_one_by_one, flat, made, remainder
from .test_dial import assert_equal, ours


class Language(nn.Module):
    """Causal attention over tokens, and classes for each of them; ``flat`` as most losses want them."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.flat = flat
        self.embedding, self.first, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(self.embedding(x))).unsqueeze(1)
        h = F.scaled_dot_product_attention(h, h, h, is_causal=True).squeeze(1)
        y = self.head(torch.tanh(h))
        return y.flatten(0, 1) if self.flat else y.mT


def language(*, flat: bool) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    words = torch.randint(5, (3, 4))
    return Language(flat=flat).double(), words[:, :-1], words[:, 1:]


def token_columns(model: nn.Module, x: Tensor, targets: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The Gauss-Newton part with one backward for each token and column, and the walk from the rest."""
    y = model(x)
    rows = y.shape[0] if model.flat else y.mT.flatten(0, 1).shape[0]
    h = torch.autograd.functional.hessian(
        lambda z: F.cross_entropy(z, targets.reshape(-1)), (y if model.flat else y.mT.flatten(0, 1)).detach()
    )
    h = torch.stack([h[n, :, n, :] for n in range(rows)])
    logits = y if model.flat else y.mT.flatten(0, 1)
    (g,) = torch.autograd.grad(F.cross_entropy(logits, targets.reshape(-1)), logits, retain_graph=True)
    carried = flat(columns_one_by_one(model, logits, h, rank))
    rest = hesscale.diagonal(logits, [*model.parameters()], g, remainder(h, rank))
    return carried, flat(rest)


def language_loss(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(x), targets.reshape(-1) if model.flat else targets)


@pytest.mark.parametrize("shape", ["flat", "positions"])
def test_all_columns_keep_tokens_apart(shape: str) -> None:
    model, x, targets = language(flat=shape == "flat")
    carried, _ = token_columns(model, x, targets, 5)
    loss = language_loss(model, x, targets)
    assert_equal(flat(hesscale.diagonal(loss, [*model.parameters()], method="hesscale_gn", rank="full")), carried)


@pytest.mark.parametrize("shape", ["flat", "positions"])
def test_signs_over_tokens_are_unbiased(shape: str) -> None:
    """Also exact where tokens do not meet: in the last layer, of flat logits."""
    model, x, targets = language(flat=shape == "flat")
    params = [*model.parameters()]
    carried, rest = token_columns(model, x, targets, 1)
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack(
        [
            flat(hesscale.diagonal(language_loss(model, x, targets), params, rank=1, generator=generator))
            for _ in range(2000)
        ]
    )
    expected = carried + rest
    error = (draws.mean(0) - expected).abs() / (draws.std(0) / 2000**0.5).clamp_min(1e-12)
    moving = draws.std(0) > 1e-9 * expected.abs().max()
    assert moving.any()
    assert error[moving].max() < 5  # standard errors of the mean, over some hundred entries
    assert_equal(draws[0][~moving], expected[~moving])
    head = flat([p for name, p in model.named_parameters()]).numel() - model.head.weight.numel() - 5
    assert (not moving[head:].any()) == (shape == "flat")


def test_signs_over_a_mixed_batch_are_unbiased_and_named() -> None:
    model, x = made("batch norm")
    params = [*model.parameters()]
    loss = LOSSES["cross-entropy"]
    y = model(x)
    h = blocks(loss, y)
    (g,) = torch.autograd.grad(loss(y), y, retain_graph=True)
    rest = flat(hesscale.diagonal(y, params, g, remainder(h, 1), retain_graph=True))
    expected = flat(columns_one_by_one(model, y, h, 1)) + rest
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack(
        [flat(hesscale.diagonal(loss(model(x)), params, rank=1, generator=generator)) for _ in range(2000)]
    )
    moving = draws.std(0) > 1e-9 * expected.abs().max()
    error = (draws.mean(0) - expected).abs() / (draws.std(0) / 2000**0.5).clamp_min(1e-12)
    assert error[moving].max() < 5
    sizes = [p.numel() for p in params]
    names = [name for name, _ in model.named_parameters()]
    kept = [name for name, part in zip(names, moving.split(sizes), strict=True) if not part.any()]
    assert kept == ["0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]  # the norm takes a bias before it off again
    report = hesscale.check(loss(model(x)), rank=1)
    assert report.columns is not None
    assert report.columns.mixed == {"NativeBatchNormBackward0": 2}
    assert report.columns.likelihoods == {"LogSoftmaxBackward0": 1}
    assert "NativeBatchNormBackward0" in str(report)


def test_check_names_what_is_joined() -> None:
    model, x, targets = language(flat=True)
    report = hesscale.check(language_loss(model, x, targets), rank=1)
    assert report.columns is not None and report.columns.joined == 3  # all but the last layer
    assert not report.columns.mixed
    assert hesscale.check(language_loss(model, x, targets)).columns is None
    model, x = made("cnn")
    report = hesscale.check(LOSSES["cross-entropy"](model(x)), rank="full", method="hesscale_gn")
    assert report.columns is not None and not report.columns.joined and not report.columns.mixed


def filled(model: nn.Module) -> Tensor:
    return flat(p.curvature for p in model.parameters())  # type: ignore[misc]


def test_backward_attach_and_accumulation() -> None:
    model, x = made("transformer")
    loss = LOSSES["weighted, smoothed, summed"]
    expected = ours(model, x, "weighted, smoothed, summed", 2)
    grads = flat(torch.autograd.grad(loss(model(x)), [*model.parameters()]))
    hesscale.backward(loss(model(x)), rank=2)
    assert torch.equal(filled(model), expected)
    assert torch.equal(flat(p.grad for p in model.parameters()), grads)
    retained = loss(model(x))
    hesscale.backward(retained, rank=2, retain_graph=True)
    hesscale.backward(retained, rank=2)
    assert_equal(filled(model), 3 * expected)
    model.zero_grad()
    (hesscale.attach(loss(model(x)), rank=2) / 4).backward()
    assert_equal(filled(model), expected / 4)
    armed = hesscale.attach(loss(model(x)), rank=2)
    armed.backward(retain_graph=True)
    armed.backward()
    assert_equal(filled(model), expected * 2.25)
    model.zero_grad()
    with warnings.catch_warnings(action="ignore"):  # torch warns of cycles
        hesscale.attach(loss(model(x)), rank=2).backward(create_graph=True)
    assert_equal(filled(model), expected)


def test_hooks_do_not_take_columns_for_gradients() -> None:
    model, x = made("cnn")
    hidden = model[:2](x)
    hidden.retain_grad()
    seen: list[Tensor] = []
    hidden.register_hook(seen.append)
    model[5].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    hesscale.backward(LOSSES["cross-entropy"](model[2:](hidden)), rank=3)
    assert len(seen) == 2
    expected = model[:2](x)
    (g,) = torch.autograd.grad(LOSSES["cross-entropy"](model[2:](expected)), expected)
    torch.testing.assert_close(hidden.grad, g, rtol=0, atol=0)


def test_inputs_that_are_no_parameters() -> None:
    """Activations belong to examples, so their squares need no formula; and they pass nothing on twice."""
    model, x = made("mlp")
    x = x.requires_grad_()
    hidden = model[:2](x)
    y = model[2:](hidden)
    loss = LOSSES["cross-entropy"]
    h = blocks(loss, y)
    exact = []
    for target in (hidden, x, model[0].weight, y):
        total = torch.zeros_like(target)
        for n in range(N):
            rows = torch.stack([torch.autograd.grad(y[n, c], target, retain_graph=True)[0] for c in range(CLASSES)])
            total += torch.einsum("c...,cd,d...->...", rows, h[n], rows)
        exact.append(total)
    found = hesscale.diagonal(loss(y), [hidden, x, model[0].weight, y], method="hesscale_gn", rank="full")
    assert_equal(flat(found), flat(exact))


def test_checkpoints_may_be_read() -> None:
    model, x = made("mlp")
    plain = ours(model, x, "cross-entropy", 2)
    x = x.requires_grad_()
    y = model[2:](checkpoint(model[:2], x, use_reentrant=False))
    assert_equal(flat(hesscale.diagonal(LOSSES["cross-entropy"](y), [*model.parameters()], rank=2)), plain)
    y = checkpoint(model, x, use_reentrant=False)
    hesscale.backward(LOSSES["cross-entropy"](y), rank=2)
    assert_equal(filled(model), plain)


def test_half_precision() -> None:
    model, x = made("mlp")
    model, x = model.float(), x.float()
    loss = lambda y: F.cross_entropy(y, LABELS)  # noqa: E731
    plain = hesscale.diagonal(loss(model(x)), [*model.parameters()], rank=1)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    hesscale.backward(loss(y.float()), rank=1)
    for p, expected in zip(model.parameters(), plain, strict=True):
        assert p.curvature.dtype is torch.float32
        assert (p.curvature - expected).norm() < 0.1 * expected.norm()


def test_both_sides_of_a_difference() -> None:
    """Two branches that are compared: their columns go down both, with opposite signs."""
    torch.manual_seed(0)
    left, right = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    shared = nn.Linear(2, 2).double()
    params = [*shared.parameters(), *left.parameters(), *right.parameters()]
    x = random(N, 3)
    loss = F.mse_loss(shared(left(x)), shared(right(x).tanh()))
    found = hesscale.diagonal(loss, params, method="hesscale_gn", rank="full", retain_graph=True)
    y = shared(left(x)) - shared(right(x).tanh())
    rows = [torch.autograd.grad(e, params, retain_graph=True, allow_unused=True) for e in y.reshape(-1)]
    exact = [sum(0 if g is None else g.square() for g in each) * 2 / y.numel() for each in zip(*rows, strict=True)]
    assert_equal(flat(found), flat(torch.as_tensor(e).expand(p.shape) for e, p in zip(exact, params, strict=True)))


def test_scalars_around_the_loss() -> None:
    """A root of the loss: curvature arrives at the likelihood from outside, too."""
    model, x = made("mlp")
    y = model(x)
    (plain,) = hesscale.diagonal(LOSSES["cross-entropy"](y).sqrt(), y)
    (found,) = hesscale.diagonal(LOSSES["cross-entropy"](y := model(x)).sqrt(), y, rank=1)
    assert plain is not None and found is not None
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-14)


def test_what_cannot_be_is_refused_before_anything_has_changed() -> None:
    model, x = made("mlp")
    loss = LOSSES["cross-entropy"](model(x))
    for rank in (-1, 1.0, True, "all", None):
        with pytest.raises(ValueError, match='rank must be a number of columns, 0 or more, or "full"'):
            hesscale.backward(loss, rank=rank)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank= goes with 'hesscale' and 'hesscale_gn'"):
        hesscale.backward(loss, rank=1, method="bl89")
    with pytest.raises(ValueError, match="rank= goes with 'hesscale' and 'hesscale_gn', not with 'ggn'"):
        hesscale.estimate("ggn", model, F.cross_entropy, (x, LABELS), rank=1)
    with pytest.raises(ValueError, match=r"rank=1 carries the curvature of a likelihood.*LogSoftmaxBackward0"):
        hesscale.backward(model(x).tanh().sum(), rank=1)
    with pytest.raises(ValueError, match="rank='full' carries"):
        hesscale.attach((model(x) ** 4).sum(), rank="full")
    assert all(p.grad is None for p in model.parameters())


def test_estimate_and_compare() -> None:
    model, x = made("cnn relu")
    found = hesscale.estimate("hesscale", model, F.cross_entropy, (x, LABELS), rank="full")
    exact = hesscale.estimate("hessian", model, F.cross_entropy, (x, LABELS))
    assert_equal(flat(found.values()), flat(exact.values()))
    errors = [
        max(
            c.relative_error
            for c in hesscale.testing.compare_with_exact(model, F.cross_entropy, (x, LABELS), rank=k).values()
        )
        for k in (0, 3)
    ]
    assert errors[1] < 1e-8 < errors[0]
    ended = nn.Sequential(model, nn.LogSoftmax(1))
    same = hesscale.estimate("hesscale_gn", ended, F.nll_loss, (x, LABELS), rank="full")
    assert_equal(flat(same.values()), flat(exact.values()))
    mean = hesscale.estimate_over(
        "hesscale", model, F.cross_entropy, [(x[:2], LABELS[:2]), (x[2:], LABELS[2:])], rank=2
    )
    assert_equal(
        flat(mean.values()), flat(hesscale.estimate("hesscale", model, F.cross_entropy, (x, LABELS), rank=2).values())
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(9, 4), nn.LSTM(4, 5, 2, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.embedding(x))[1][0][-1])


@pytest.mark.parametrize("call", ["backward", "diagonal"])
def test_a_fused_recurrent_kernel_is_what_its_steps_are(call: str) -> None:
    """One node in single precision on a CPU, many in double."""
    torch.manual_seed(0)
    model, x, y = Recurrent(), torch.randint(9, (8, 6)), torch.randint(3, (8,))
    if call == "diagonal":
        found = hesscale.diagonal(F.cross_entropy(model(x), y), model, rank=2)
    else:
        hesscale.backward(F.cross_entropy(model(x), y), rank=2)
        found = {name: p.curvature for name, p in model.named_parameters()}
    report = hesscale.check(F.cross_entropy(model(x), y), rank=2)
    assert report.columns is not None and not report.columns.mixed and not report.columns.joined
    model = model.double()
    expected = hesscale.diagonal(F.cross_entropy(model(x), y), model, rank=2)
    for name, s in expected.items():
        assert s is not None
        torch.testing.assert_close(found[name].double(), s, rtol=1e-4, atol=1e-5 * float(s.abs().max()))
