"""What the best attention known would make of a pass over a tree: libraries that obey no mask, and plain products.

`command` measures and reads; `ways` are the calls; `ratio` puts their times in place of ours in a measured pass.
"""
