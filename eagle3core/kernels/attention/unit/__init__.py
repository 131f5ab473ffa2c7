"""The two products of a unit of keys, by what the cache is stored in: scores, and values added to a warp's sums.

Imports `layout` alone; `tile` has what lies between them. Another format of the cache is a function more in each file.
"""
