"""kernelzoo: networks as their papers print them, weights that are proven.

    model = trained(ResNet50)                  its default checkpoint: every byte checked, in eval mode
    trained("resnet50:imagenet1k_v1")          another one, by its name
    VGG19(num_classes=10)                      a network, untrained, in train mode; network("vgg19", num_classes=10) likewise
    networks("*resnet*")                       the names that there are
    predict(model, "cat.jpg")                  labels, by the preprocessing that the checkpoint was measured with
    detect(detector, "street.jpg")             boxes in the photograph's own pixels, labels, scores
    segment(segmenter, "street.jpg")           the class of every pixel, and how much of the photograph each takes
    explain(model, "cat.jpg")                  why: a map over the photograph; `measure` says how far it can be trusted
    features(model, at="layer3")               inner tensors; `body`, `head`, `pyramid`, `reset_head` work on every family too
    dream(model, "sky.jpg").save("dream.png")  what a layer finds in a picture, made more of; `dream_video` makes a film
    embed(model, "photos/", "vectors.parquet") vectors of many images
    recommend("photos/").trained               the checkpoint to start from, compared on your own images
    finetune(ResNet50, "photos/", "runs/one")  training on your own images; `find_rate` tries learning rates first
    stylize("cat.jpg", "embers")               a photograph repainted; `train_style` learns a style from one picture
    fast(model)                                the same call on other kernels; `why` explains, `plain` gives the network back
    fast_step(model, loss, optimizer)          a whole step of training as one

`CATALOGUE` has every classifier by name; each is one line of `zoo/catalogue.py`, under its paper's link, with its published parameter
count. Detectors are lines of `zoo/detection/catalogue.py`, segmenters of `zoo/segmentation/catalogue.py`.
Nothing heavy is loaded before it is asked for: `import zoo` needs no torch.
`help(trained)` shows arguments, results and errors. Packages beside this one: `weights` finds, checks and keeps; `convert` reads and writes
other frameworks' files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weights import NoPretrainedWeights as NoPretrainedWeights
    from weights import WeightsError as WeightsError
    from weights import WeightsMismatch as WeightsMismatch
    from zoo.catalogue import *  # noqa: F403
    from zoo.catalogue import CATALOGUE as CATALOGUE
    from zoo.catalogue import network as network
    from zoo.detection.catalogue import *  # noqa: F403
    from zoo.detection.detections import Detections as Detections
    from zoo.detection.run import detect as detect
    from zoo.dreaming.run import dream as dream
    from zoo.dreaming.run import dream_frames as dream_frames
    from zoo.dreaming.run import dream_video as dream_video
    from zoo.embedding.run import embed as embed
    from zoo.explanation.measures import measure as measure
    from zoo.explanation.result import Explanation as Explanation
    from zoo.explanation.run import explain as explain
    from zoo.extraction.features import Features as Features
    from zoo.extraction.features import body as body
    from zoo.extraction.features import features as features
    from zoo.extraction.features import head as head
    from zoo.extraction.features import pyramid as pyramid
    from zoo.extraction.taps import UnknownTap as UnknownTap
    from zoo.finetuning.rates import find_rate as find_rate
    from zoo.finetuning.run import finetune as finetune
    from zoo.kernels.api.fast import fast as fast
    from zoo.kernels.api.fast import plain as plain
    from zoo.kernels.api.fast import why as why
    from zoo.kernels.api.network import Fast as Fast
    from zoo.kernels.training.step import fast_step as fast_step
    from zoo.networks.model import Model as Model
    from zoo.prediction.predict import Prediction as Prediction
    from zoo.prediction.predict import predict as predict
    from zoo.pretrained.heads import reset_head as reset_head
    from zoo.pretrained.trained import trained as trained
    from zoo.recommendation.result import Recommendation as Recommendation
    from zoo.recommendation.run import recommend as recommend
    from zoo.segmentation.catalogue import *  # noqa: F403
    from zoo.segmentation.run import Segmentation as Segmentation
    from zoo.segmentation.run import segment as segment
    from zoo.segmentation.unet import UNet as UNet
    from zoo.stylizing.photographs import stylize as stylize
    from zoo.stylizing.training import train_style as train_style
    from zoo.variants import networks as networks

__version__ = "0.1.0"

_PLACES = {
    "zoo.catalogue": "CATALOGUE network",
    "zoo.networks.model": "Model",
    "zoo.pretrained.trained": "trained",
    "zoo.pretrained.heads": "reset_head",
    "zoo.prediction.predict": "Prediction predict",
    "zoo.explanation": "Explanation explain measure",
    "zoo.extraction.features": "Features body features head pyramid",
    "zoo.extraction.taps": "UnknownTap",
    "zoo.detection": "Detections detect",
    "zoo.dreaming.run": "dream dream_frames dream_video",
    "zoo.embedding.run": "embed",
    "zoo.finetuning.run": "finetune",
    "zoo.finetuning.rates": "find_rate",
    "zoo.kernels.api.fast": "fast plain why",
    "zoo.kernels.api.network": "Fast",
    "zoo.kernels.training.step": "fast_step",
    "zoo.recommendation": "Recommendation recommend",
    "zoo.segmentation": "Segmentation UNet segment",
    "zoo.stylizing.photographs": "stylize",
    "zoo.stylizing.training": "train_style",
    "zoo": "networks",
    "weights": "NoPretrainedWeights WeightsError WeightsMismatch",
}
_OTHERS = {
    "list_models": 'zoo.networks("*resnet*") lists networks',
    "create_model": 'zoo.network("resnet50") builds a network, trained("resnet50") loads its weights',
    "get_model": 'zoo.network("resnet50") builds a network, trained("resnet50") loads its weights',
    "get_weight": 'trained("resnet50:imagenet1k_v1") loads weights by their name',
}
"""What to do instead of other libraries' functions."""
_PLACE = {name: module for module, names in _PLACES.items() for name in names.split()}


if not TYPE_CHECKING:  # type checkers read the names above, and know of no others

    def __getattr__(name: str) -> Any:
        """Load a public name when it is first asked for; every network is one."""
        from importlib import import_module

        if name == "__all__":
            from zoo.variants import of_all_tasks

            return [*sorted(_PLACE), *of_all_tasks()]
        if name == "networks":
            return import_module("zoo.networks")  # a package that can be called
        known = name in _PLACE or name[:1].isupper()  # a network's name begins with a capital
        found = getattr(import_module(_PLACE.get(name, "zoo.catalogue")), name, None) if known else None
        if found is None and known:
            from zoo.variants import of_all_tasks

            found = import_module("zoo.catalogue").any_class(name) if name in of_all_tasks() else None
        if found is None:
            raise AttributeError(f"module 'zoo' has no attribute {name!r}{_hint(name)}")
        if name in _PLACE:  # networks are left out: see __dir__
            globals()[name] = found
        return found


def _hint(name: str) -> str:
    if name.startswith("_"):  # Python's own tools ask for these
        return ""
    from weights.arguments import did_you_mean
    from weights.errors import UnknownWeights
    from zoo.variants import of_all_tasks, spelt

    try:
        return f"; did you mean {spelt(name)}? Or by its name: zoo.network({name!r}), trained({name!r})"
    except UnknownWeights:
        todo = _OTHERS.get(name)
        return f"; {todo}" if todo else did_you_mean(name, [*_PLACE, *of_all_tasks()], cutoff=0.7) or "; zoo.networks() lists the networks"


def __dir__() -> list[str]:
    """List the public names without the networks: help(zoo) would show the thousand lines of torch's Module for each of them."""
    return sorted({*globals(), *_PLACE})
