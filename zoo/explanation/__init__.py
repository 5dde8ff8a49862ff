"""Why a network answers what it answers: `explain` draws it on the photograph, `measure` says how far the drawing can be trusted."""

from zoo.explanation import cams, gradients, perturbations, rectifiers
from zoo.explanation.program import CannotExplain
from zoo.explanation.result import Explanation
from zoo.explanation.run import explain
from zoo.explanation.table import METHODS, Method

__all__ = ["METHODS", "CannotExplain", "Explanation", "Method", "explain"]
