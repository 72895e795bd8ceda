"""Our values against those of the official HesScale, its paper and the exact Hessian (see golden/README.md)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hesscale

FILES = sorted((Path(__file__).parent / "golden").glob("*.npz"))
TOLERANCE = 1e-10

LAYERS: dict[str, Any] = {
    "linear": nn.Linear,
    "conv": lambda inputs, outputs, kernel, options=None: nn.Conv2d(inputs, outputs, kernel, **(options or {})),
    "maxpool": nn.MaxPool2d,
    "avgpool": nn.AvgPool2d,
    "flatten": nn.Flatten,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "leakyrelu": nn.LeakyReLU,
    "elu": nn.ELU,
}
LOSSES: dict[str, Any] = {"ce": nn.functional.cross_entropy, "mse": nn.functional.mse_loss}


DEFECTS = {
    ("defect_avgpool", "hesscale"),
    ("defect_avgpool", "hesscale_gn"),
    # what is lost there is a second derivative, which Gauss-Newton leaves out anyway
    ("defect_mse_final_sigmoid", "hesscale"),
    ("defect_mse_final_tanh", "hesscale"),
}


class Golden:
    """One file: its network with its parameters loaded, and its values as tensors by parameter name."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        with np.load(path) as arrays:
            self.meta = json.loads(str(arrays["meta"]))
            self._tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files if name != "meta"}
        self.model = nn.Sequential(*(LAYERS[kind](*arguments) for kind, *arguments in self.meta["spec"])).double()
        self.model.load_state_dict(self["param"])

    def __getitem__(self, kind: str) -> dict[str, Tensor]:
        """All values of one kind; the paper's are kept only where the official ones differ from them."""
        found = {name.split("/")[1]: value for name, value in self._tensors.items() if name.startswith(f"{kind}/")}
        if not found and kind.startswith("paper_") and self.meta["expect"] == "match":
            return self[kind.removeprefix("paper_")]
        return found

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def loss(self) -> Tensor:
        loss_function = LOSSES[self.meta["loss"]]
        loss: Tensor = loss_function(self.model(self.tensor("x")), self.tensor("y"), reduction=self.meta["reduction"])
        return loss

    def curvature(self, method: str) -> dict[str, Tensor]:
        hesscale.backward(self.loss(), method=method)
        return {name: parameter.curvature for name, parameter in self.model.named_parameters()}


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def assert_all_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


def relative_distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs)


def test_all_files_are_here() -> None:
    assert len(FILES) == 17
    assert {path.stem for path in FILES if Golden(path).meta["expect"] == "differ"} == {name for name, _ in DEFECTS}


def test_loss_and_gradients(golden: Golden) -> None:
    loss = golden.loss()
    torch.testing.assert_close(loss.detach(), golden.tensor("loss"), rtol=TOLERANCE, atol=TOLERANCE)
    hesscale.backward(loss)
    gradients = {name: parameter.grad for name, parameter in golden.model.named_parameters()}
    assert_all_close(gradients, golden["grad"])


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
def test_the_equations_of_the_paper(golden: Golden, method: str) -> None:
    assert_all_close(golden.curvature(method), golden[f"paper_{method}"])


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
def test_the_official_code_is_met_where_it_follows_the_paper_and_only_there(golden: Golden, method: str) -> None:
    ours, official = golden.curvature(method), golden[method]
    if (golden.name, method) in DEFECTS:
        assert relative_distance(official, ours) > 0.05
    else:
        assert_all_close(ours, official)


def test_bl89(golden: Golden) -> None:
    # with a squared error there is no softmax to take for an element-wise function
    expected = golden["bl89_intended"] if golden.meta["loss"] == "ce" else golden["paper_hesscale"]
    assert_all_close(golden.curvature("bl89"), expected)


def test_the_exact_diagonal(golden: Golden) -> None:
    parameters = dict(golden.model.named_parameters())
    exact = hesscale.testing.exact_diagonal(golden.loss(), list(parameters.values()))
    assert_all_close(dict(zip(parameters, exact, strict=True)), golden["exact_diag_h"])
