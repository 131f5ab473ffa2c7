"""Performance gates: short runs that must be green three times in a row before long ones are allowed.

From `config` (one TOML: contexts, lengths, thresholds) over `measure` (the bench, in performance mode) and `judging`
(pass, fail or missing, and which bound binds) to `history` (what was green, for which code, settings and GPU).
"""
