"""Attention over a paged cache with a tree mask over the newest keys.

Read `launcher` first, then `layout` (how work is cut up), `plan`, and one kernel: `streams` (up to 32 query rows a key
head) or `rows` (more); `combine` joins what they leave.
"""
