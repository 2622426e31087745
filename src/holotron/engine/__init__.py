"""Fast inference over the model: `LLM` for scripts, `AsyncLLM` for many concurrent callers."""

from holotron.engine.async_llm import AsyncLLM
from holotron.engine.errors import EngineError, ModelLoadError
from holotron.engine.llm import LLM
from holotron.engine.outputs import CompletionOutput, Pointed, RequestMetrics, RequestOutput
from holotron.engine.sampling_params import SamplingParams, StructuredOutputs

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineError",
    "ModelLoadError",
    "Pointed",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
]
