"""A causal model without some of its layers. A target is a draft of itself so [W A.7].

Layers count from 0. A choice of layers is text: numbers and ranges (`3,5-7`), or `every-N` for every N-th layer.
"""

from collections.abc import Collection
from typing import Any

from outrider.runtime.errors import CheckpointError, UnsupportedModel

_EVERY = "every-"


def read_layers(text: str) -> list[range]:
    """The ranges of layers that the text names; `every-N` has no end.

    Raises:
        ValueError: it names none. The text is one line.
    """
    if text.startswith(_EVERY):
        step = text.removeprefix(_EVERY)
        if not step.isdecimal() or int(step) < 2:
            raise ValueError(f"'{text}' is not every-N with N of 2 or more, for example every-3: layers 2, 5, 8, ...")
        return [range(int(step) - 1, 1 << 20, int(step))]
    ranges = []
    for part in text.split(","):
        first, dash, last = (each.strip() for each in part.partition("-"))
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal() or int(last) < int(first):
            raise ValueError(f"'{part}' is neither a layer nor a range of layers; for example 3,5-7, or every-3")
        ranges.append(range(int(first), int(last) + 1))
    return ranges


def write_layers(layers: Collection[int]) -> str:
    """The shortest text that names those layers."""
    parts: list[str] = []
    first = last = None
    for layer in [*sorted(layers), None]:
        if first is not None and last is not None and layer != last + 1:
            parts.append(f"{first}" if first == last else f"{first}-{last}")
            first = None
        first = layer if first is None else first
        last = layer
    return ",".join(parts)


class DecoderLayers:
    """The decoder layers of a causal model of transformers, which runs with any of them.

    Attributes:
        count: how many there are.

    Raises:
        UnsupportedModel: the model has an encoder, or its layers are not found.
    """

    def __init__(self, model: Any, name: str) -> None:
        from torch.nn import ModuleList  # here: settings read the texts, and need no torch

        self._config = model.config.get_text_config()
        self.count = int(self._config.num_hidden_layers)
        if model.config.is_encoder_decoder:
            raise UnsupportedModel(f"--skip-layers: '{name}' has an encoder; only causal models run without layers")
        found = [
            (parent, key)
            for parent in model.modules()
            for key, child in parent.named_children()
            if isinstance(child, ModuleList) and len(child) == self.count
        ]
        if len(found) != 1:
            raise UnsupportedModel(
                f"--skip-layers: {type(model).__name__} has {len(found)} lists of {self.count} layers; it must have one"
            )
        self._parent, self._key = found[0]
        self._list, self._layers = ModuleList, list(getattr(*found[0]))
        self._by_layer = {  # lists of the configuration with an entry for each layer, such as layer_types
            key: list(value)
            for key, value in vars(self._config).items()
            if "layer" in key and isinstance(value, list) and len(value) == self.count
        }

    def skip(self, skipped: Collection[int]) -> None:
        """Leaves out those layers, and no others; the rest is numbered from 0 on, as caches need it."""
        kept = [layer for layer in range(self.count) if layer not in skipped]
        for number, layer in enumerate(kept):
            for module in self._layers[layer].modules():
                if isinstance(getattr(module, "layer_idx", None), int):
                    module.layer_idx = number
        setattr(self._parent, self._key, self._list(self._layers[layer] for layer in kept))
        self._config.num_hidden_layers = len(kept)
        for key, values in self._by_layer.items():
            setattr(self._config, key, [values[layer] for layer in kept])


def skip_layers(model: Any, text: str, name: str) -> tuple[int, ...]:
    """Leaves out the layers that the text names, for good. Returns them in order.

    Raises:
        CheckpointError: the model lacks one of them, or none is left; or see `DecoderLayers`.
    """
    layers = DecoderLayers(model, name)
    try:
        ranges = read_layers(text)
    except ValueError as error:
        raise CheckpointError(f"--skip-layers: {error}") from error
    if not text.startswith(_EVERY) and (most := max(each[-1] for each in ranges)) >= layers.count:
        raise CheckpointError(f"--skip-layers {text}: '{name}' has layers 0 to {layers.count - 1}, and no layer {most}")
    skipped = tuple(layer for layer in range(layers.count) if any(layer in each for each in ranges))
    if not 0 < len(skipped) < layers.count:
        raise CheckpointError(
            f"--skip-layers {text} leaves {layers.count - len(skipped)} of the {layers.count} layers of '{name}'; "
            "leave out at least one, and keep at least one"
        )
    layers.skip(skipped)
    return skipped
