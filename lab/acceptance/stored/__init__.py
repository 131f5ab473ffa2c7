"""What a stored run says of its drafts: read back, told request by request, and weighed against other drafts.

Imports acceptance's counts, paths and shapes, `options` and `rows`; nothing is decoded here. A newcomer may add a shape
to what can be asked about.
"""
