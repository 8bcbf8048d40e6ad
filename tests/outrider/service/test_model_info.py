"""The description of a model holds only what requests can name."""

from outrider.runtime.loader import ModelSource, load_model
from outrider.runtime.tokenizer import load_tokenizer
from outrider.service.model_info import describe
from protos.outrider.v1 import model_pb2
from tests.cluster import MODELS


def test_end_tokens_that_the_tokenizer_lacks_are_left_out() -> None:
    """They are never drawn, and rules for logits refuse them."""
    source = ModelSource(str(MODELS / "draft"), dtype="float32", device="cpu")
    loaded, tokenizer = load_model(source), load_tokenizer(source)
    own = loaded.eos_token_ids
    loaded.eos_token_ids = (*own, loaded.vocab_size + 3, -1)
    assert tuple(describe(loaded, tokenizer, limits=model_pb2.Limits(), features=[]).eos_token_ids) == own != ()
