"""A checkpoint's tokenizer as the engine sees it: exact bytes of tokens, and its chat."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from holotron.engine.errors import ModelLoadError
from holotron.model.chat import Chat


class Vocabulary:
    """`size` is the model's: ids that the tokenizer does not know are never generated.

    Raises ModelLoadError where tokenizer and model do not fit, or a token's bytes are not its text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, size: int) -> None:
        if len(tokenizer) > size:
            raise ModelLoadError(f"the tokenizer has {len(tokenizer)} tokens, the model only {size}")
        if tokenizer.eos_token_id is None:
            raise ModelLoadError("the tokenizer names no eos_token, so nothing would end a reply")
        self.tokenizer = tokenizer
        self.size = size
        self.eos = int(tokenizer.eos_token_id)
        self.stops = frozenset({self.eos})  # all that end a reply; checkpoints may name more than one
        self.grammar_tokenizer: LLTokenizer = from_tokenizer(tokenizer, n_vocab=size, eos_token=self.eos)
        added = tokenizer.added_tokens_decoder
        self.specials = frozenset(i for i, token in added.items() if token.special)
        self.token_bytes = [
            b"" if i in self.specials or i >= len(tokenizer) else self._bytes_of(i) for i in range(size)
        ]
        for i, token in added.items():
            if i not in self.specials and self.token_bytes[i] != str(token.content).encode():
                raise ModelLoadError(f"token {i} {token.content!r} is {self.token_bytes[i]!r} to the grammar")
        self.lengths: NDArray[np.int32] = np.array([len(b) for b in self.token_bytes], dtype=np.int32)
        self.unknown = torch.arange(size) >= len(tokenizer)
        self.has_unknown = size > len(tokenizer)

    def _bytes_of(self, token: int) -> bytes:
        # llguidance marks specials with 0xff, which no UTF-8 text holds, and so loses that byte's own token
        return self.grammar_tokenizer.decode_bytes([token]) or b"\xff"

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt as written; special tokens spelled in it count as such."""
        # the backend's own encode holds no state, so several threads may prepare requests at once
        return list(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_chat(self, messages: list[dict[str, Any]], template_kwargs: dict[str, Any]) -> list[int]:
        """Token ids of messages under the checkpoint's chat template, open for the assistant's reply.

        See `holotron.model.chat.Chat`. Raises ValueError for messages the template refuses.
        """
        return self._chat.prompt_ids(messages, template_kwargs=template_kwargs)

    @cached_property
    def _chat(self) -> Chat:
        return Chat(self.tokenizer)
