"""Attention by warps that walk by themselves, of up to 32 query rows: streams (`streams`) or whole splits (`splits`).

May import attention's layout, tile and unit; attention's plan and variants import it. A newcomer may add a way to share
the work among warps here: a kernel beside these two, of the same `walk` and the same joins.
"""
