"""What a night found, in a few sentences, the worst first: made from rows, each with its figure and maybe a remedy.

`rules` is the table of what looks at the rows. `remedies` is the other one: a gate, or a rule that warns -> what to do,
and where the runbook says more. A newcomer may add a line to either; a test holds that no gate and
no warning is without a remedy. Imports `rows` and `night`; needs neither torch nor a plotting library.
"""
