"""What a step gives each sequence, as the host reads it: result rows, and log-probabilities where they are asked for.

Imports the kernels' cards and the configuration; the runner and whoever keeps the book of requests import it. Something
else that is to be known of each committed token is a file beside `logprobs`.
"""

from eagle3core.step.outcome.logprobs import KeptLogprobs, TokenLogprob, keep_logprobs, new_kept_logprobs
from eagle3core.step.outcome.rows import Outcome, RowOutcome

__all__ = ["KeptLogprobs", "Outcome", "RowOutcome", "TokenLogprob", "keep_logprobs", "new_kept_logprobs"]
