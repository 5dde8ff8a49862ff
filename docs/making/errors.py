"""docs/troubleshooting.md: every error class that a user can meet, what it means by its own docstring, and what to do."""

from __future__ import annotations

import ast
import builtins
from functools import cache
from pathlib import Path

from making.tables import generated, page, table
from zoo.commands.app import EXIT_CODES

ROOT = Path(__file__).parents[2]
HEAD = f"""\
# Troubleshooting

Every message names the source, says what is wrong, and says what to do. If you don't know where the trouble is, start with `zoo doctor`. It
examines cache, disk, network, GPU and extras.

## Symptoms

| you see | do |
|---|---|
| `zoo: command not found` | activate the environment of [the installation](install.md), or call `python -m zoo` |
| `import weights` or `import convert` finds something else | rename your own `weights.py` or `convert.py`, which hides ours |
| CUDA out of memory | `--batch-size` with a smaller number; in training `--accumulate 2`, or `fast(model, train=True, recompute=True)` |
| the GPU is not used | `zoo doctor --torch` says what PyTorch sees; `--device cuda` selects it |
| `fast` is not faster | `print(why(model))` says what runs and why a kernel was not taken; see [the GPU page](gpu.md) |
| wrong classes with a converted file | channel order, range or size may be [GUESSED](convert.md#pixels) |
| low accuracy with your own preprocessing | use `model.preprocess`; an accuracy holds for its checkpoint's own pixels |
| a download hangs behind a proxy | set `HTTPS_PROXY`; `zoo doctor` tests proxy, mirror and hosts |
| an interrupted command | repeat it; it resumes where resuming is promised in [the command](cli.md) |

{EXIT_CODES}

## Errors

Each error can also be caught by the built-in class in the second column. Errors of weights and conversion derive from
`weights.WeightsError`. The command prints their message without a traceback.
"""
DO: dict[str, dict[str, str]] = {
    "Find weights": {
        "weights.UnknownWeights": "Check the spelling; the message has the nearest names. `zoo list` and `zoo info NAME` show all.",
        "weights.NoPretrainedWeights": "Take the network that the message names, or give a file: `trained(DenseNet264, FILE)`.",
        "weights.NoSuchFile": "Check the path.",
        "weights.BadRecord": "Correct the registry table; the message names the key. `help(weights.Checkpoint)` explains each.",
        "weights.WeightsMismatch": "Compare names and shapes. Take another network, `num_classes` or option; `zoo inspect FILE` helps.",
        "zoo.pretrained.classes.AmbiguousClass": "Give the WordNet id instead of the name.",
    },
    "Download": {
        "weights.SourceUnavailable": "Read what each source answered. Check network and proxy with `zoo doctor`, then repeat.",
        "weights.sources.Gone": "Check repository, revision and file; set `HF_TOKEN` for private ones.",
        "weights.RateLimited": "Wait until `retry_at`, or set `HF_TOKEN`.",
        "weights.Offline": "Unset the variable that the message names, or bring the weights: [air-gap](airgap.md).",
        "weights.InsecureSource": "Use https, or a source without a password in its address.",
        "weights.ProtocolError": "Open the address in a browser. It may be a login page or the answer of a proxy.",
        "weights.HashMismatch": "Do not use the file. Repeat the download; if it stays, ask the publisher.",
        "weights.ChangedUpstream": "Find out why the publisher changed the file. If you accept it: `zoo lock --update NAME`.",
        "weights.SizeMismatch": "Repeat the download.",
    },
    "Cache and lock": {
        "weights.CorruptCache": "Connect to a network and repeat, or run `zoo verify`, which prints the repairing command.",
        "weights.CacheNotWritable": "Set `ZOO_CACHE` to a folder that you can write, or fill the cache beforehand.",
        "weights.NoSpace": "Free the bytes that the message names: `zoo gc`. Then repeat.",
        "weights.NotLocked": "Pin the weights with `zoo lock NAME`, or unset `ZOO_FROZEN`.",
        "weights.BadLock": "Restore `weights.lock` from version control, and change it only with `zoo lock`.",
        "weights.BadSignature": "Check the key and the file. Do not install it otherwise.",
        "weights.OutputsDiffer": "Compare torch versions and processors in the message. `zoo unbundle --no-check` skips the comparison.",
    },
    "Read and convert files": {
        "weights.UnsupportedFormat": "The message says how the file begins. See [formats](formats.md); export it as ONNX or safetensors.",
        "weights.MalformedFile": "Copy or download the file again: it is damaged.",
        "weights.NonFinite": "Use an earlier checkpoint: the training has diverged.",
        "weights.LimitExceeded": "Do not trust the file. A sound file this large can be converted to safetensors in its own framework.",
        "weights.UnsafeFormat": "Ask the author for safetensors.",
        "weights.MissingLibrary": "Install the extra that the message names.",
        "weights.ReaderCrashed": "Do not trust the file. If a limit in the message ended the reader, it may only be too large.",
        "weights.CallRefused": "Report the call that the message names.",
        "weights.ReaderUnavailable": "Free memory or processes, and repeat.",
        "convert.conversion.Undecided": "Give `--kernel-convention` and `--spatial`, or evidence: `--reference`, `--images`.",
        "convert.match.NoUniqueMatch": "Rename your layers like the file's, or take a file with a graph.",
        "zoo.conversion.result.NotProven": "Correct what the diagnosis names, such as an option or padding. See [convert](convert.md).",
        "weights.ConvertError": "Follow the message; it is the base of the errors above.",
        "weights.WeightsError": "Follow the message; it is the base of all errors of weights.",
    },
    "Images and vectors": {
        "zoo.images.BadImage": "Replace or remove the file. Runs over many images leave it out by themselves.",
        "zoo.images.reading.NoSuchImage": "Check the path.",
        "zoo.images.files.StoreFailed": "Check credentials and network of the store, then repeat; the run resumes.",
        "zoo.images.parquet_pages.TooMuch": "Check the file; write it again with smaller row groups.",
        "zoo.kernels.quantizing.quantize.NotCertified": "Give more images or a wider `tolerance`, or compute in bfloat16.",
        "zoo.images.preprocessed.WrongInput": "Prepare images with `model.preprocess(images)`.",
        "zoo.embedding.reading.DamagedEmbeddings": "Compute the vectors again with `zoo embed --restart`.",
        "zoo.UnknownTap": "Take one of the nearest names in the message. See [taps](features.md#taps).",
        "zoo.explanation.CannotExplain": "Take a method, target or tap that the message names.",
        "zoo.dreaming.NothingToDream": "Choose another layer with `--at`, or `at=` in Python.",
        "zoo.commands.console.CannotWrite": "Make the folder, or add `--replace` where the file may go.",
    },
    "Train": {
        "zoo.finetuning.NotFinite": "Lower the learning rate or clip gradients, then resume.",
        "zoo.training.Diverged": "Lower the learning rate, then repeat the call; it resumes.",
        "zoo.stylizing.training.Diverged": "Lower the learning rate, then repeat the command; it resumes.",
        "zoo.finetuning.Stopped": "Resume with `zoo finetune --resume FOLDER`.",
        "zoo.stylizing.training.Stopped": "Repeat the command; it resumes.",
        "zoo.finetuning.batches.TooManyUnreadable": "Look at the listed images. `--set max_unreadable=0.1` allows more.",
        "zoo.finetuning.checkpoint.Damaged": "Resume with the network and data of the run, or start again with `--restart`.",
    },
}
"""What to do about each error, under the headings of the page."""
CAUGHT = {
    "convert.formats._keras_graph.NotUnderstood": "the weights are read without the graph",
    "weights.patience.Again": "the attempt is repeated",
    "zoo.bench.cell.DeviceLost": "`zoo bench` saves its record and says how to go on",
    "zoo.kernels.engines.engine.NotFinite": "the network itself answers",
    "zoo.kernels.engines.export.EngineError": "another engine runs, and `why` says so",
    "zoo.kernels.errors.Untraceable": "the network runs unchanged, and `why` says so",
    "zoo.kernels.measuring.stopwatch.Stopped": "the plan that nobody wants any more is dropped",
    "zoo.kernels.measuring.timing.NotCapturable": "calls run one by one",
    "zoo.kernels.ops._cudnn.NoPlan": "another of cuDNN's plans or another kernel runs",
    "zoo.kernels.plans.arena.Changed": "the plan runs without its arena",
    "zoo.kernels.plans.program.StepFailed": "PyTorch computes the step",
    "zoo.kernels.plans.proving.Unlike": "the network runs unchanged, and `why` says so",
    "zoo.kernels.training.replay.Moved": "the network is recorded again",
}
"""Errors that never reach a user, and what happens instead."""


@cache
def classes() -> dict[str, tuple[list[str], str]]:
    """Map every error class of ours, by module and name, to its bases and the first sentence of its docstring."""
    found: dict[str, tuple[list[str], str]] = {}
    for room in ("zoo", "weights", "convert"):
        for file in sorted((ROOT / room).rglob("*.py")):
            source = file.read_text(encoding="utf-8")
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            for node in ast.walk(ast.parse(source)) if "class " in source else ():
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    words = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
                    found[f"{module}.{node.name}"] = ([ast.unparse(base).rpartition(".")[2] for base in node.bases], words)
    errors = {name for name in dir(builtins) if isinstance(kind := getattr(builtins, name), type) and issubclass(kind, BaseException)}
    kept: dict[str, tuple[list[str], str]] = {}
    while more := {place: about for place, about in found.items() if place not in kept and errors & {*about[0]}}:
        kept |= more
        errors |= {place.rpartition(".")[2] for place in more}
    return kept


def without_entry() -> list[str]:
    """Return the error classes that the page lacks, and the entries that no class has."""
    known = classes()
    listed = {_place(name, known) for entries in DO.values() for name in entries} | {*CAUGHT}
    return sorted(listed ^ {*known})


def write() -> dict[str, str]:
    """Return the text of the page by its name in docs/."""
    known = classes()
    if wrong := without_entry():
        raise ValueError(f"making/errors.py: {', '.join(wrong)} stand in DO or CAUGHT, or are error classes, not both")
    parts: list[str] = []
    for heading, entries in DO.items():
        rows = [[f"`{name}`", _builtin(name, known), known[_place(name, known)][1], todo] for name, todo in entries.items()]
        parts += [f"### {heading}", table(["error", "is a", "meaning", "what to do"], rows)]
    return {"troubleshooting.md": page(generated("the error classes and docs/making/errors.py"), HEAD, *parts)}


def _place(name: str, known: dict[str, tuple[list[str], str]]) -> str:
    """Return where a class is defined, of the name by which users import it."""
    package, _, own = name.rpartition(".")
    return (
        name if name in known else next((place for place in known if place.startswith(f"{package}.") and place.endswith(f".{own}")), name)
    )


def _builtin(name: str, known: dict[str, tuple[list[str], str]]) -> str:
    """Return the built-in class that an error derives from, nearest first; the last base where it has two."""
    ahead = [name.rpartition(".")[2]]
    while ahead:
        one = ahead.pop(0)
        if hasattr(builtins, one):
            return f"`{one}`"
        ahead += [base for place, (bases, _) in known.items() if place.endswith(f".{one}") for base in reversed(bases)]
    raise ValueError(f"{name} is no error")
