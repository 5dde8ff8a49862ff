"""Why a network answers what it answers: `explain` draws it on the photograph, `measure` says how far the drawing can be trusted."""

# Each of these adds its methods to the table.
from zoo.explanation import attentions, cams, gradients, perturbations, rectifiers, relevance  # noqa: F401
from zoo.explanation.class_images import ClassImage, class_image
from zoo.explanation.maps import Region
from zoo.explanation.measures import Measured, measure
from zoo.explanation.program import CannotExplain
from zoo.explanation.result import Explanation
from zoo.explanation.run import explain
from zoo.explanation.table import METHODS, Method

__all__ = ["METHODS", "CannotExplain", "ClassImage", "Explanation", "Measured", "Method", "Region", "class_image", "explain", "measure"]
