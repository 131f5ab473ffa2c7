"""How the device keeps its slots: one int32 table of fields by slot, and one row of numbers a finished step.

The table is `[N_FIELDS, S]`, a field's values side by side, so that a field is a contiguous tensor of its own. The row
is what the host reads of a sequence, one step behind. Source: docs/requirements.md R-47, R-48, R-81.
"""

from __future__ import annotations

# Fields of the table, in order.
#   running 1 while the slot holds an unfinished request; length tokens in the target's cache; limit most of them;
#   root the last sampled token, not yet in the cache; draft_length entries of the draft's cache made from true target
#   states; n_pending committed tokens the draft has not read; budget tokens the request may still get; plain 1 once an
#   invariant broke: the slot goes on without its drafts; request_id whose sequence it is; most_drafts of a path that
#   the request uses.
FIELDS = ("running", "length", "limit", "root", "draft_length", "n_pending", "budget", "plain", "request_id",
          "most_drafts")  # fmt: skip
RUNNING, LENGTH, LIMIT, ROOT, DRAFT_LENGTH, N_PENDING, BUDGET, PLAIN, REQUEST_ID, MOST_DRAFTS = range(len(FIELDS))
N_FIELDS = len(FIELDS)

MOST_ENDS = 32  # end tokens of a request that the device looks for, a lane each; -1 fills up

# A result row: these numbers, then the committed tokens (-1 past the end), then the drafted ones.
#   slot -1 for a dead row; accepted drafts; committed tokens, cut at an end; finish; fault bits; whose row it is.
RESULT = ("slot", "n_accepted", "n_committed", "finish", "fault", "request_id")
N_RESULT = len(RESULT)

RESULT_BLOCKS = 2  # the newest step's, and the one being read: programs take them in turn

GOES_ON, FOUND_END, SPENT_BUDGET, STOPPED, NO_CHOICE_LEFT = range(5)  # finish; the last: logits that are not finite
NO_FAULT, BAD_ACCEPTANCE, MISSING_BLOCKS, NO_ROOM, NOT_FINITE = 0, 1, 2, 4, 8  # fault bits

# What the host says of a pass over prompts, each a table `[fields, n]`, so that a field is a contiguous tensor.
#   A span: -1 for a dead one, else its slot; position of its first token; whose it is.
SPAN = ("slot", "start", "request_id")
SPAN_SLOT, SPAN_START, SPAN_REQUEST_ID = range(len(SPAN))
N_SPAN = len(SPAN)

#   A request whose prompt ends in the pass, those first, then -1: its slot; row of the pass that its last token has;
#   where that row's taps are kept until the draft reads them; drafts of a path that it uses.
REQUEST = ("slot", "n_prompt", "budget", "plain", "request_id", "last_row", "seed_row", "most_drafts")
N_REQUEST = len(REQUEST)


def result_width(path_len: int, nodes: int) -> int:
    """Numbers of a result row."""
    return N_RESULT + path_len + nodes - 1
