# SPDX-License-Identifier: Apache-2.0
"""A small transformer that classifies texts, read as bytes: no vocabulary, no file."""

from typing import Any

import keras
from keras import layers, ops

# Bytes, and one more for "no byte here": token 0 is the padding, byte b is token b + 1.
TOKENS = 257
_WIDTH, _HEADS, _BLOCKS = 128, 4, 2


def transformer(shape: tuple[int], classes: int) -> keras.Model:
    """Two blocks of self-attention before normalised sums, and the mean over the text.

    Vaswani et al., Attention Is All You Need (NeurIPS 2017); normalisation first, as in Xiong et
    al. (ICML 2020), so that it learns without a warm-up.

    Args:
        shape: (length,) of the texts, in tokens as `TOKENS` says; shorter ones end in zeros.
        classes: number of classes.
    """
    [length] = shape
    tokens = keras.Input((length,), dtype="int32")
    is_text = layers.Lambda(_is_text, name="is_text")(tokens)
    hidden = _Embedding(length)(tokens)
    for _ in range(_BLOCKS):
        inner = layers.LayerNormalization()(hidden)
        attention = layers.MultiHeadAttention(_HEADS, _WIDTH // _HEADS)
        attended = attention(inner, inner, key_mask=is_text)
        hidden = layers.Add()([hidden, attended])
        inner = layers.LayerNormalization()(hidden)
        inner = layers.Dense(4 * _WIDTH, activation="gelu")(inner)
        hidden = layers.Add()([hidden, layers.Dense(_WIDTH)(inner)])
    hidden = layers.LayerNormalization()(hidden)
    pooled = layers.GlobalAveragePooling1D()(hidden, mask=is_text)
    return keras.Model(tokens, layers.Dense(classes)(pooled), name="transformer")


@keras.saving.register_keras_serializable(package="tf_hips")
class _Embedding(layers.Layer):
    """The sum of what a token and its place mean."""

    def __init__(self, length: int, **options: Any) -> None:
        super().__init__(**options)
        self._length = length
        self._tokens = layers.Embedding(TOKENS, _WIDTH)
        self._places = layers.Embedding(length, _WIDTH)

    def build(self, input_shape: Any) -> None:
        self._tokens.build(input_shape)
        self._places.build((self._length,))

    def call(self, tokens: Any) -> Any:
        return self._tokens(tokens) + self._places(ops.arange(self._length))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "length": self._length}


@keras.saving.register_keras_serializable(package="tf_hips")
def _is_text(tokens: Any) -> Any:
    # A text that is empty would have nothing to attend to; its first place always counts.
    return ops.logical_or(ops.not_equal(tokens, 0), ops.equal(ops.arange(tokens.shape[1]), 0))
