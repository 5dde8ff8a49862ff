"""TAB: networks, tags and files, whatever case they are typed in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zoo import ResNet20
from zoo.pretrained.add_file import add_file

COMPLETE = """
from zoo.commands.app import main
main([])
"""
COSTS = """
import atexit, json, os, re, sys, time
def tell():
    json.dump({"heavy": sorted({"torch", "numpy", "PIL"} & set(sys.modules)), "cpu_s": time.process_time()}, open(sys.argv[1], "w"))
atexit.register(tell)
from zoo.commands.app import main
main([])
"""


def completed(words: list[str], cwd: Path, program: str = COMPLETE, *arguments: str) -> list[str]:
    """Complete the last word as bash asks for it."""
    asked = {"_ZOO_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    settings = {**os.environ, **asked}
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=settings, cwd=cwd)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("zoo info vgg19", ["VGG19", "VGG19_BN"]),
        ("zoo info VGG1", ["VGG11", "VGG13", "VGG16", "VGG19", "VGG11_BN", "VGG13_BN", "VGG16_BN", "VGG19_BN"]),
        ("zoo pull resnet50 -w IMAGE", ["imagenet1k_v2", "imagenet1k_v1"]),
        ("zoo predict x.jpg --model vgg19 --weights i", ["imagenet1k_v1"]),
        ("zoo pull resnet50 : Imagenet1k_V2", ["imagenet1k_v2"]),
        ("zoo lock ResNet20 :", ["cifar10", "akamaster"]),
        ("zoo bench --models VGG19,resnet110", ["VGG19,ResNet110"]),
        ("zoo inspect Wei", ["weights.h5"]),
        ("zoo convert a.h5 b.npz --reference OUT", ["Out/"]),
        ("zoo inspect weights", []),  # the shell's own completion knows it
        ("zoo predict photo.jpg --model runs/m", []),
        ("zoo pull nothing -w x", []),
    ],
)
def test_a_word_is_completed_in_any_case(line: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "weights.h5").touch()
    (tmp_path / "Out").mkdir()
    assert completed(line.split(" "), tmp_path) == found


def test_only_what_is_ones_own_is_offered_to_be_removed(tmp_path: Path) -> None:
    torch.save(ResNet20().state_dict(), tmp_path / "mine.pth")
    add_file(ResNet20, tmp_path / "mine.pth", "mine")
    assert completed(["zoo", "remove", "res"], tmp_path) == ["ResNet20:mine"]
    assert completed(["zoo", "remove", "resnet20", ":", "m"], tmp_path) == ["mine"]
    assert completed(["zoo", "remove", "vgg"], tmp_path) == []


def test_completing_a_tag_is_cheap(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    assert completed(["zoo", "pull", "resnet50", "-w", "image"], tmp_path, COSTS, str(figures)) == ["imagenet1k_v2", "imagenet1k_v1"]
    assert json.loads(figures.read_text())["heavy"] == []


def test_another_shell_gets_the_name_with_its_tag(tmp_path: Path) -> None:
    settings = {**os.environ, "_ZOO_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    settings["_TYPER_COMPLETE_ARGS"] = "zoo lock resnet20:CIF"
    done = subprocess.run([sys.executable, "-c", COMPLETE], capture_output=True, text=True, env=settings, cwd=tmp_path)
    assert done.stdout.split() == ["ResNet20:cifar10"]
