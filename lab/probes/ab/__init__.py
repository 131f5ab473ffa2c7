"""Two commits, settings or engines measured in turns on one machine, and what may be said of the difference.

`command` is `eagle3lab ab`; `turns` runs the two sides as processes, A B A B; `slowdown` plants a known slowdown in one
kernel of a captured step, to see that its row and no other one is called slower; `judging` gives the words.
"""
