"""The 1,797 handwritten digits that come with scikit-learn: data that needs no download."""

from __future__ import annotations

from pathlib import Path

import torch

from .task import Labelled

TEST = 297
"""Images kept for testing, always the same."""


def read_digits(folder: Path | None = None, *, train: bool) -> Labelled:
    """Images of 8 × 8 pixels with values 0 … 16, [N, 1, 8, 8], and labels: 1,500 for training, 297 for testing."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]
    except ModuleNotFoundError:
        raise FileNotFoundError("the digits come with scikit-learn: pip install scikit-learn") from None
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    kept = order[TEST:] if train else order[:TEST]
    images = torch.from_numpy(found.images).to(torch.uint8).unsqueeze(1)
    return images[kept], torch.from_numpy(found.target).long()[kept]
