"""Optimizers that scale Adam's step by curvature."""

from .curvature_scaled import CurvatureScaled as CurvatureScaled
from .presets import AdaBL89 as AdaBL89
from .presets import AdaGGNMC as AdaGGNMC
from .presets import AdaHesScale as AdaHesScale
from .presets import AdaHesScaleGN as AdaHesScaleGN
from .presets import AdaHessian as AdaHessian
from .sources import Hutchinson as Hutchinson
from .sources import Propagated as Propagated
from .sources import SampledGaussNewton as SampledGaussNewton
from .sources import Source as Source
