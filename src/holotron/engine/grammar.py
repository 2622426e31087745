"""Structured output: which tokens may come next, and which must.

llguidance says which tokens keep the text inside the grammar. On top of that the mask here is *canonical*:
where the grammar forces the next bytes, only a token that the tokenizer would use there is allowed. With
`span` the forced bytes, that is the first token of the tokenization of `span`, or any token that reaches
beyond it. Shorter cuts are refused, since models never saw them; longer tokens stay possible, since models
were trained on them. A token alone in the mask is forced: it needs no sampling. So the text is the same with
skipping and without.

For tokenizers that take the longest match (all of ours) this is exact; for merging ones (BPE) the last token
before the end of a span may differ from what the tokenizer makes of the whole text.
"""

from __future__ import annotations

import json
from functools import lru_cache

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from holotron.engine.sampling_params import StructuredOutputs
from holotron.engine.vocabulary import Vocabulary

# llguidance would cut a forced span into tokens by itself, which loses tokens that reach beyond it.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'


class GrammarError(RuntimeError):
    """The grammar engine gave up on a request: too complex, or no token fits."""


class Constraint:
    """The place of one sequence in its grammar."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._allowed: NDArray[np.bool_] | None = None

    @property
    def complete(self) -> bool:
        """The text satisfies the grammar and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self) -> NDArray[np.bool_]:
        """(vocabulary size,) the tokens that may come next. Raises GrammarError if there are none."""
        if self._allowed is None:
            self._allowed = self._canonical_mask()
        return self._allowed

    def forced(self) -> int | None:
        """The only token that may come next, if there is only one and it is text."""
        if self.complete:
            return None
        allowed = self.allowed()
        token = int(allowed.argmax())
        alone = np.count_nonzero(allowed) == 1 and token not in self._vocabulary.specials
        return token if alone else None

    def accept(self, token: int) -> None:
        self._allowed = None
        if not self._matcher.consume_token(token):
            raise GrammarError(f"token {token} does not fit: {self._matcher.get_error()}")

    def _canonical_mask(self) -> NDArray[np.bool_]:
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(words, count=self._vocabulary.size, bitorder="little").astype(np.bool_)
        if not mask.any():
            raise GrammarError(f"no token fits: {self._matcher.get_error() or 'the vocabulary lacks one'}")
        span = self._matcher.compute_ff_bytes()
        if span:
            first = self._vocabulary.grammar_tokenizer.tokenize_bytes(span)[0]
            if mask[first]:
                mask &= self._vocabulary.lengths > len(span)
                mask[first] = True
        return mask


class Grammars:
    """Compiles structured outputs, and remembers the last ones: agents send the same schema at every step."""

    def __init__(self, vocabulary: Vocabulary, remembered: int = 64) -> None:
        self._vocabulary = vocabulary
        self._compiled = lru_cache(maxsize=remembered)(self._compile)

    def constraint(self, wanted: StructuredOutputs) -> Constraint:
        """Raises ValueError for a schema or expression that cannot be enforced as a whole."""
        return Constraint(self._vocabulary, self._compiled(_grammar_text(wanted)).deep_copy())

    def _compile(self, grammar: str) -> LLMatcher:
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._vocabulary.grammar_tokenizer)
        if failed:
            first = messages[0].strip().splitlines()
            raise ValueError(f"structured_outputs cannot be enforced: {' '.join(' '.join(first).split())}")
        matcher = LLMatcher(self._vocabulary.grammar_tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"structured_outputs cannot be enforced: {matcher.get_error()}")
        return matcher


def _grammar_text(wanted: StructuredOutputs) -> str:
    if wanted.json is not None:
        schema = dict(json.loads(wanted.json) if isinstance(wanted.json, str) else wanted.json)
        # pitfall: a grammar that allows whitespace allows it without end
        schema["x-guidance"] = {"whitespace_flexible": False, "lenient": False}
        start = "%json " + json.dumps(schema, ensure_ascii=True, allow_nan=False)
    elif wanted.regex is not None:
        start = str(json.loads(LLMatcher.grammar_from_regex(wanted.regex))["grammars"][0]["lark_grammar"])
        return LLMatcher.grammar_from_lark(_NO_FORCING + start)
    else:
        start = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice or ())
    return LLMatcher.grammar_from_lark(f"{_NO_FORCING}start: {start}")
