"""The tasks: sizes and first values of the networks, augmentation as PIL has it, splits, fields."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import hesscale
from hesscale_lab.batches import generator_for, load
from hesscale_lab.tasks import images as augmentation
from hesscale_lab.tasks.classifiers import Dropout
from hesscale_lab.tasks.images import augment, crop_and_flip, jitter
from hesscale_lab.tasks.table import TASKS, task_named

from ..small_archives import write_cifar

PARAMETERS = {
    "mnist-mlp": (1_336_610, 1_336_610),
    "cifar10-3c3d": (370_922, 895_210),
    "cifar100-3c3d": (394_052, 918_340),
    "cifar100-allcnnc": (1_387_108, 1_387_108),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_networks_are_as_large_as_the_authors_and_deepobs_have_them(name: str) -> None:
    images = torch.zeros(2, *((1, 28, 28) if name == "mnist-mlp" else (3, 32, 32)), dtype=torch.uint8)
    before = torch.random.get_rng_state()
    for variant, count in zip(("paper", "deepobs"), PARAMETERS[name], strict=True):
        task = TASKS[name].with_fields([("variant", variant)])
        model = task.make(generator_for(0, "weights")).eval()
        assert sum(p.numel() for p in model.parameters()) == count
        assert model(task.prepare(images)).shape == (2, task.classes)
    assert task.activation == "relu"
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("name, expected", [("cifar10-3c3d", 3.060), ("cifar100-3c3d", 5.487)])
def test_the_first_loss_is_the_one_the_authors_start_from(name: str, expected: float) -> None:
    """ln C + ½ λ‖W‖²: their curves begin at 3.09 and 5.51, a little cross-entropy more."""
    task = TASKS[name]
    model = task.make(generator_for(0, "weights"))
    squares = sum(float(p.detach().square().sum()) for p in model.parameters() if p.dim() > 1)
    assert math.log(task.classes) + 0.5 * task.weight_decay * squares == pytest.approx(expected, abs=0.02)


def test_first_weights_are_the_authors() -> None:
    weight = TASKS["mnist-mlp"].make(generator_for(0, "weights"))[1].weight  # type: ignore[index]
    assert float(weight.detach().abs().max()) <= 0.06  # type: ignore[union-attr]
    assert float(weight.detach().std()) == pytest.approx(0.88 * 0.03, rel=0.01)  # type: ignore[operator, union-attr]
    biases = [p for p in TASKS["cifar100-allcnnc"].make(generator_for(0, "weights")).parameters() if p.dim() == 1]
    assert all(bool((bias == 0.1).all()) for bias in biases)


def test_curvature_passes_through_the_deepest_network() -> None:
    task = TASKS["cifar100-allcnnc"].with_fields([("width", 0.05)])
    for variant in ("paper", "deepobs"):
        model = task.with_fields([("variant", variant)]).make(generator_for(0, "weights"))
        x = torch.rand(2, 3, 32, 32, generator=generator_for(0, "x"))
        hesscale.backward(F.cross_entropy(model(x), torch.tensor([1, 2])))
        assert all(bool(p.curvature.isfinite().all()) for p in model.parameters())  # type: ignore[attr-defined]


def test_dropout_draws_from_its_generator_only() -> None:
    drop, x = Dropout(0.5), torch.ones(1000)
    results = []
    for _ in range(2):
        drop.generator = generator_for(0, "dropout")
        results.append(drop(x))
    assert torch.equal(*results)
    assert set(results[0].tolist()) == {0.0, 2.0}
    assert drop.eval()(x) is x


ENHANCE = {augmentation.BRIGHTNESS: "Brightness", augmentation.CONTRAST: "Contrast", augmentation.SATURATION: "Color"}


def test_colors_are_changed_as_by_pil() -> None:
    pil = pytest.importorskip("PIL.Image")
    enhance = pytest.importorskip("PIL.ImageEnhance")
    generator = generator_for(0, "colors")
    images = torch.randint(256, (12, 3, 32, 32), generator=generator).float()
    factors = 0.2 + 1.6 * torch.rand(12, 3, generator=generator)
    order = torch.rand(12, 3, generator=generator).argsort(1)
    ours = jitter(images, factors, order)
    for image, own, kinds, result in zip(images, factors, order, ours, strict=True):
        other = pil.fromarray(image.permute(1, 2, 0).byte().numpy())
        for kind in kinds.tolist():
            other = getattr(enhance, ENHANCE[kind])(other).enhance(float(own[kind]))
        difference = result.permute(1, 2, 0).numpy() - np.asarray(other).astype(float)
        assert np.abs(difference).max() <= 1 and np.mean(difference != 0) < 1e-3  # rounding down near a whole number


def test_crops_and_flips_are_those_of_the_padded_image() -> None:
    images = torch.arange(1, 5 * 3 * 16 + 1, dtype=torch.uint8).view(5, 3, 4, 4)
    moved = crop_and_flip(images, generator_for(0, "moves"))
    for image, result in zip(images, moved, strict=True):
        padded = F.pad(image, (2, 2, 2, 2)).float()
        places = [(top, left) for top in range(5) for left in range(5)]
        crops = [padded[:, top : top + 4, left : left + 4] for top, left in places]
        assert any(torch.equal(result, candidate) for crop in crops for candidate in (crop, crop.flip(2)))


def test_augmented_images_differ_and_can_be_repeated() -> None:
    images = torch.randint(256, (1, 3, 32, 32), generator=generator_for(0, "image"), dtype=torch.uint8).repeat(
        8, 1, 1, 1
    )
    once, again = (augment(images, generator_for(0, "augmentation")) for _ in range(2))
    assert torch.equal(once, again)
    assert len({tuple(image.flatten().tolist()) for image in once}) == 8
    task = TASKS["cifar10-3c3d"]
    assert not torch.equal(task.prepare(images, generator_for(0, "augmentation")), task.prepare(images))


def test_pixels_are_normalized() -> None:
    white = torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)
    assert float(TASKS["mnist-mlp"].prepare(white[:, :1]).max()) == 1.0
    red = float(TASKS["cifar10-3c3d"].prepare(white)[0, 0, 0, 0])
    assert red == pytest.approx((1 - 0.49139968) / 0.24703223, rel=1e-6)


def test_training_and_validation_are_apart_and_drawn_by_the_seed(tmp_path: Path) -> None:
    write_cifar(tmp_path, 20, classes=10)
    task = TASKS["cifar10-3c3d"].with_fields([("batch", 8)])
    task = type(task)(**{**vars(task), "validation": 30, "measured": 20})
    first, again, other = (load(task, seed=seed, folder=tmp_path) for seed in (0, 0, 1))
    assert sorted([*first.train.tolist(), *first.valid.tolist()]) == list(range(100))
    assert torch.equal(first.valid, again.valid) and not torch.equal(first.valid, other.valid)
    assert [len(y) for _, y in first.epoch(1)] == [8] * 8  # 70 images: the last 6 wait for another epoch
    assert {name: sum(len(y) for _, y in pieces) for name, pieces in first.measured(0).items()} == {
        "train": 16,
        "valid": 24,
        "test": 16,
    }
    assert load(task, seed=0, subset=9, folder=tmp_path).steps == 1
    for subset, complaint in ((5, "5 examples are less than one batch of 8"), (71, "there are 70 training examples")):
        with pytest.raises(ValueError, match=complaint):
            load(task, seed=0, subset=subset, folder=tmp_path)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("foo=1", "unknown field 'foo': choose among variant, activation"),
        ("activation=cos", "unknown activation 'cos': choose among tanh"),
        ("variant=mine", "unknown variant 'mine': choose among paper, deepobs"),
        ("width=wide", "width must be a positive number, not 'wide'"),
        ("batch=0", "batch must be a positive whole number, not 0"),
        ("weight_decay=-1", "weight_decay must be a number from 0, not -1.0"),
        ("relu", "a field is given as name=value, not 'relu'"),
    ],
)
def test_a_wrong_field_is_one_sentence(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        TASKS["digits"].parse_fields([text])


def test_an_unknown_task_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="unknown task 'foo': choose among digits, mnist-mlp"):
        task_named("foo")
