"""The shipped translation pair is as its card says."""

from typing import Any

import torch
from transformers import T5ForConditionalGeneration

from models.translation.measure import measure
from models.translation.train import HERE
from tests.models.pair_checks import check_token_maps, check_weights, megabytes

TARGET_PARAMETERS, DRAFT_PARAMETERS = 2_035_968, 234_336
ROWS = 48


def test_the_shipped_pair_is_as_its_card_says() -> None:
    for member, layers, parameters in (("target", 8, TARGET_PARAMETERS), ("draft", 1, DRAFT_PARAMETERS)):
        model = T5ForConditionalGeneration.from_pretrained(HERE / member)
        assert (model.config.num_decoder_layers, model.num_parameters()) == (layers, parameters)
        check_weights(HERE / member)
    check_token_maps(HERE)
    assert megabytes(HERE) < 5


# Seen with 256 sentences: 90 % right at T = 0; α 0.914 ± 0.004 and 0.895 ± 0.004.
def test_the_shipped_pair_translates_and_the_draft_is_often_right() -> None:
    torch.set_num_threads(1)
    result = measure(HERE / "target", HERE / "draft", ROWS)
    quality: Any = result["quality"]
    alphas: Any = result["acceptance"]
    assert quality["target at T=0"]["right"] > 0.75
    assert quality["target at T=0"]["word_error_rate"] < 0.05
    assert [row.temperature for row in alphas] == [1.0, 0.0]
    assert all(0.85 < row.alpha < 0.95 for row in alphas)
