"""Every option of a run is checked before anything is read."""

from __future__ import annotations

import json

import pytest

from zoo.finetuning import Settings


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"epochs": 0}, "epochs is at least 1, got 0"),
        ({"epochs": 1.5}, "epochs is a int, got 1.5"),
        ({"balance": 1}, "balance is a bool, got 1"),
        ({"optimizer": "adam"}, "optimizer is one of sgd, adamw, got 'adam'"),
        ({"warmup": 2.0}, "warmup is at least 0 and at most 1, got 2.0"),
        ({"lr": 0.0}, "lr is a number above 0, got 0.0"),
        ({"ema": 1.0}, "ema is at least 0 and below 1, got 1.0"),
        ({"layer_decay": 0.0}, "layer_decay is above 0 and at most 1, got 0.0"),
        ({"randaugment": 31}, "randaugment is at least 0 and at most 30, got 31"),
        ({"monitor": "top1"}, "monitor is one of"),
    ],
)
def test_what_can_not_be_is_refused_by_name(told: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("?", r"\?").replace("(", r"\(")):
        Settings.of(told)


def test_a_misspelt_option_is_told_the_right_word() -> None:
    for name, meant in (("learning_rate", "lr"), ("label_smooth", "label_smoothing")):
        with pytest.raises(TypeError, match=rf"finetune\(\) takes no '{name}'; did you mean {meant}\?"):
            Settings.of({name: 0.1})


def test_settings_come_back_from_json() -> None:
    settings = Settings(lr=0.3, epochs=4, mixup=0.2)
    assert Settings.of(json.loads(json.dumps(settings.table()))) == settings


def test_the_usual_rate_follows_the_batch_and_is_higher_for_fresh_weights() -> None:
    assert Settings().rate(128, fresh=False) == 2 * Settings().rate(64, fresh=False)
    assert Settings().rate(64, fresh=True) > Settings().rate(64, fresh=False)
    assert Settings(lr=0.7).rate(128, fresh=True) == 0.7
