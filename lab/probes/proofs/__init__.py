"""Proofs of the engine on the GPU's kernels, as rows: `eagle3lab prove`.

`identity` (speculation changes no bit), `parity` (every stage against Hugging Face), `quiet` (nothing in a step waits),
`slots` (finished ones cost less), `long` (far into a context), `memory` (no access beyond a tensor), `trees` (what
their nodes cost), `waiting` (what reading prompts costs those that run), `prefill` (how long prompts take to be read),
`serving` (many clients at a server) and `adaptive` (never slower than plain, nearly as fast as the best depth). Each is
a list of checks that `check.run_checks` runs until the time is up; what did not run is missing, never passed.
"""
