"""How long prompts take to be read: first tokens, beside what a GPU's products and bytes allow and beside plain torch.

`checks` is the part of `eagle3lab prove`; `bound` counts, `peer` is plain torch. A newcomer may add a load to the plan.
"""
