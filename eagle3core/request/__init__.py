"""A request on its way through the engine, from a checked prompt to a response, and the response as its caller sees it.

Imports the configuration, the metrics and what a step gives; the engine, its book and the lab import it. What a
response says beside its tokens is a field in `response`, set by `request`.
"""

from eagle3core.request.request import Request, RequestHandle, Tokenizer, detokenize, new_request, settings_for
from eagle3core.request.response import Response, own_tokens, without_errors

__all__ = [
    "Request",
    "RequestHandle",
    "Response",
    "Tokenizer",
    "detokenize",
    "new_request",
    "own_tokens",
    "settings_for",
    "without_errors",
]
